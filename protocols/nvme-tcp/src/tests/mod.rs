//! Both sides against each other, against hand-made PDUs, and against noise.

mod calls;
mod digests;
mod noise;
mod pair;
mod traffic;
mod violations_of_hosts;
mod violations_of_targets;
mod wire;
