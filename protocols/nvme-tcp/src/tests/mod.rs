mod pair;
