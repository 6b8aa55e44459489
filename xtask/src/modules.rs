//! Which file of a crate uses which, according to the names that its modules mention.
//!
//! It works on tokens, as `scan` does, so paths inside macros count like any other, and the checks need no complete
//! Rust parser. A path is followed as the compiler would follow it: through child modules, through imports and
//! re-exports of a module, and through globs, to the module that contains the item. What is never named, such as the
//! type of a method's result, is not seen. Code that is only built for tests is ignored.

use std::collections::{HashMap, HashSet};
use std::str::FromStr;

use anyhow::{Context, Result, anyhow};
use proc_macro2::{Delimiter, Group, Ident, TokenStream, TokenTree};

/// How many imports of imports are followed. A longer chain is a name that imports itself, which means another crate.
const MAX_IMPORT_DEPTH: usize = 16;
/// The keywords before the name of an item.
const DEFINITIONS: &[&str] =
    &["struct", "enum", "union", "trait", "type", "fn", "const", "static", "mod", "macro_rules"];

/// One place where a file names an item of another one.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct FileUse {
    /// The file that names the item.
    pub from: String,
    /// The file that contains the item.
    pub to: String,
    /// The line in `from`, counted from 1.
    pub line: usize,
    /// The path by which it names the item.
    pub path: String,
}

/// Finds every use of one file by another in the crate with the root file `root`. `read` returns the text of a file, or
/// `None` if it does not exist. If a module has no file or is not Rust.
pub fn uses(root: &str, read: &dyn Fn(&str) -> Option<String>) -> Result<Vec<FileUse>> {
    let mut tree = Tree { read, files: Vec::new(), modules: Vec::new() };
    let folder = root.rsplit_once('/').map_or("", |(folder, _)| folder);
    tree.add_file(None, root, folder)?;
    Ok(tree.uses())
}

/// A module: a file, or the braces of an inline one.
#[derive(Default)]
struct Module {
    /// Index of its file.
    file: usize,
    /// The module in which it is declared.
    parent: Option<usize>,
    /// The folder of its children's files.
    folder: String,
    children: HashMap<String, usize>,
    /// Names that it imports, with their paths.
    imports: HashMap<String, Vec<String>>,
    /// Paths of modules of which it imports everything.
    globs: Vec<Vec<String>>,
    /// Names of its own items.
    items: HashSet<String>,
    mentions: Vec<Mention>,
}

/// A path in a module.
struct Mention {
    path: Vec<String>,
    line: usize,
    is_reexport: bool,
}

/// What a path leads to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Target {
    Module(usize),
    /// An item of this module.
    ItemOf(usize),
    /// Something of another crate, or a name that is local to a function.
    Outside,
}

/// One leaf of a `use` declaration.
#[derive(PartialEq, Eq, Debug)]
struct Import {
    path: Vec<String>,
    /// The name under which it is imported; `None` for a glob.
    name: Option<String>,
    line: usize,
}

struct Tree<'a> {
    read: &'a dyn Fn(&str) -> Option<String>,
    /// Paths of the files that were read.
    files: Vec<String>,
    modules: Vec<Module>,
}

impl Tree<'_> {
    /// Reads the file at `path` as a module. The files of its children are in `folder`.
    fn add_file(&mut self, parent: Option<usize>, path: &str, folder: &str) -> Result<usize> {
        let text = (self.read)(path).with_context(|| format!("{path} is not there"))?;
        let tokens = TokenStream::from_str(&text).map_err(|error| anyhow!("{path} is not Rust: {error}"))?;
        self.files.push(path.to_owned());
        self.add_module(
            Module { file: self.files.len() - 1, parent, folder: folder.to_owned(), ..Module::default() },
            tokens,
        )
    }

    fn add_module(&mut self, module: Module, tokens: TokenStream) -> Result<usize> {
        let index = self.modules.len();
        self.modules.push(module);
        self.walk(index, tokens, true)?;
        Ok(index)
    }

    /// Collects the paths in the module: directly in it, or inside one of its items.
    fn walk(&mut self, module: usize, tokens: TokenStream, is_direct: bool) -> Result<()> {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut at = 0;
        while let Some(token) = tokens.get(at) {
            let before = &tokens[..at];
            let rest = &tokens[at + 1..];
            at += 1;
            match token {
                TokenTree::Punct(punct) if punct.as_char() == '#' => at += test_length(rest),
                TokenTree::Group(group) if !is_visibility(group, before) => self.walk(module, group.stream(), false)?,
                TokenTree::Ident(word) if word == "use" && !is_punct(rest.first(), '<') => {
                    at += self.add_imports(module, before, rest, is_direct);
                }
                TokenTree::Ident(word) if word == "mod" && is_direct => at += self.add_child(module, rest)?,
                TokenTree::Ident(word) => at += self.add_name(module, before, word, rest, is_direct),
                TokenTree::Group(_) | TokenTree::Punct(_) | TokenTree::Literal(_) => {}
            }
        }
        Ok(())
    }

    /// Handles the tokens after `mod`. Returns how many there are.
    fn add_child(&mut self, parent: usize, rest: &[TokenTree]) -> Result<usize> {
        let Some(TokenTree::Ident(name)) = rest.first() else { return Ok(0) };
        let name = plain(name);
        let Module { file, folder, .. } = &self.modules[parent];
        let below = if folder.is_empty() { name.clone() } else { format!("{folder}/{name}") };
        let child = if let Some(TokenTree::Group(body)) = rest.get(1) {
            let inline = Module { file: *file, parent: Some(parent), folder: below, ..Module::default() };
            self.add_module(inline, body.stream())?
        } else {
            let (single, own) = (format!("{below}.rs"), format!("{below}/mod.rs"));
            let path = if (self.read)(&single).is_some() { single } else { own };
            self.add_file(Some(parent), &path, &below)
                .with_context(|| format!("`mod {name};` in {}", self.files[self.modules[parent].file]))?
        };
        self.modules[parent].children.insert(name, child);
        Ok(2)
    }

    /// Handles the tokens after `use`. Returns how many there are.
    fn add_imports(&mut self, module: usize, before: &[TokenTree], rest: &[TokenTree], is_direct: bool) -> usize {
        let length = rest.iter().position(|token| is_punct(Some(token), ';')).unwrap_or(rest.len());
        let is_public = match before {
            [.., TokenTree::Ident(word), TokenTree::Group(_)] | [.., TokenTree::Ident(word)] => word == "pub",
            _ => false,
        };
        let mut imports = Vec::new();
        read_imports(&rest[..length], &[], &mut imports);
        let module = &mut self.modules[module];
        for Import { path, name, line } in imports {
            match name {
                Some(name) if is_direct => _ = module.imports.insert(name, path.clone()),
                // An import inside a function counts for the whole module; few names have both meanings.
                Some(name) => _ = module.imports.entry(name).or_insert(path.clone()),
                None => module.globs.push(path.clone()),
            }
            module.mentions.push(Mention { path, line, is_reexport: is_public });
        }
        length
    }

    /// Handles a name: of an item that begins here, or the first one of a path. Returns how many tokens of the path
    /// follow.
    fn add_name(
        &mut self,
        module: usize,
        before: &[TokenTree],
        word: &Ident,
        rest: &[TokenTree],
        is_direct: bool,
    ) -> usize {
        let module = &mut self.modules[module];
        // In `macro_rules! name` there is a `!` in between.
        let previous = before.iter().rev().find(|token| !is_punct(Some(token), '!'));
        if matches!(previous, Some(TokenTree::Ident(word)) if DEFINITIONS.iter().any(|definition| word == definition)) {
            if is_direct {
                module.items.insert(plain(word));
            }
            return 0;
        }
        let line = word.span().start().line;
        let (path, length) = read_path(word, rest);
        let is_macro_variable = is_punct(before.last(), '$') && word != "crate";
        if !is_macro_variable && !is_continued(before) && may_be_path(&path, rest) {
            module.mentions.push(Mention { path, line, is_reexport: false });
        }
        length
    }

    fn uses(&self) -> Vec<FileUse> {
        let mut found = Vec::new();
        for (index, module) in self.modules.iter().enumerate() {
            for mention in &module.mentions {
                let Target::ItemOf(target) = self.resolve(index, &mention.path, 0) else { continue };
                let to = self.modules[target].file;
                let is_own_reexport = mention.is_reexport && self.is_below(target, index);
                if to != module.file && !is_own_reexport {
                    found.push(FileUse {
                        from: self.files[module.file].clone(),
                        to: self.files[to].clone(),
                        line: mention.line,
                        path: mention.path.join("::"),
                    });
                }
            }
        }
        found
    }

    /// True if `module` is `ancestor` or is below it.
    fn is_below(&self, module: usize, ancestor: usize) -> bool {
        module == ancestor || self.modules[module].parent.is_some_and(|parent| self.is_below(parent, ancestor))
    }

    fn resolve(&self, module: usize, path: &[String], depth: usize) -> Target {
        let Some((first, rest)) = path.split_first() else { return Target::Outside };
        if depth > MAX_IMPORT_DEPTH {
            return Target::Outside;
        }
        let start = match first.as_str() {
            "crate" => Some(Target::Module(0)),
            name => self.lookup(module, name, depth),
        };
        let mut target = start.unwrap_or(Target::Outside);
        for name in rest {
            // What follows the name of an item belongs to the item: a variant, an associated function.
            let Target::Module(at) = target else { break };
            // An item that is in no tokens is made by a macro of that module.
            target = self.lookup(at, name, depth).unwrap_or(Target::ItemOf(at));
        }
        target
    }

    /// The meaning of a name in a module; `None` if the module has no such name.
    fn lookup(&self, at: usize, name: &str, depth: usize) -> Option<Target> {
        let module = &self.modules[at];
        if name == "self" {
            return Some(Target::Module(at));
        }
        if name == "super" {
            return module.parent.map(Target::Module);
        }
        if let Some(child) = module.children.get(name) {
            return Some(Target::Module(*child));
        }
        if let Some(path) = module.imports.get(name) {
            return Some(self.resolve(at, path, depth + 1));
        }
        if module.items.contains(name) {
            return Some(Target::ItemOf(at));
        }
        let mut through = module.globs.iter().map(|glob| self.resolve(at, glob, depth + 1));
        through.find_map(|glob| match glob {
            Target::Module(from) if from != at && depth < MAX_IMPORT_DEPTH => self.lookup(from, name, depth + 1),
            _ => None,
        })
    }
}

/// How many tokens to skip after a `#`: the attribute and what it applies to, if that is only built for tests,
/// otherwise none.
fn test_length(rest: &[TokenTree]) -> usize {
    let is_inner = is_punct(rest.first(), '!');
    let length = if is_inner { 2 } else { 1 };
    match rest.get(length - 1) {
        Some(TokenTree::Group(group)) if is_test_only(group) && is_inner => rest.len(),
        Some(TokenTree::Group(group)) if is_test_only(group) => length + item_length(&rest[length..]),
        _ => 0,
    }
}

/// True for `#[test]`, `#[cfg(test)]` and `#[cfg(all(test, ...))]`.
fn is_test_only(attribute: &Group) -> bool {
    let words = attribute.stream().to_string().replace(' ', "");
    words == "test" || words == "cfg(test)" || words.starts_with("cfg(all(test,")
}

/// How many tokens belong to the item, field or statement that begins here.
fn item_length(tokens: &[TokenTree]) -> usize {
    let ends_with_semicolon =
        |word: &Ident| ["use", "const", "static", "type", "let"].iter().any(|other| word == other);
    // A comma ends a field or an arm, but not an item whose parameters it separates.
    let is_item = |word: &Ident| ["fn", "impl", "struct", "enum", "trait"].iter().any(|other| word == other);
    let (mut needs_semicolon, mut passes_commas) = (false, false);
    for (at, token) in tokens.iter().enumerate() {
        match token {
            TokenTree::Ident(word) if is_item(word) => (needs_semicolon, passes_commas) = (false, true),
            TokenTree::Ident(word) if ends_with_semicolon(word) => needs_semicolon = true,
            TokenTree::Punct(punct) if punct.as_char() == ';' => return at + 1,
            TokenTree::Punct(punct) if punct.as_char() == ',' && !passes_commas && !needs_semicolon => return at + 1,
            TokenTree::Group(group) if group.delimiter() == Delimiter::Brace && !needs_semicolon => return at + 1,
            _ => {}
        }
    }
    tokens.len()
}

/// The leaves of a `use` declaration, without its `use` and its `;`.
fn read_imports(tokens: &[TokenTree], prefix: &[String], found: &mut Vec<Import>) {
    for leaf in tokens.split(|token| is_punct(Some(token), ',')) {
        let mut path = prefix.to_vec();
        let mut line = 0;
        let mut alias = None;
        let mut is_name = true;
        for (at, token) in leaf.iter().enumerate() {
            line = token.span().start().line;
            match token {
                TokenTree::Ident(word) if word == "as" => {
                    alias = leaf.get(at + 1).map(ToString::to_string);
                    break;
                }
                TokenTree::Ident(word) => path.push(plain(word)),
                TokenTree::Group(group) => {
                    is_name = false;
                    let inner: Vec<TokenTree> = group.stream().into_iter().collect();
                    read_imports(&inner, &path, found);
                }
                TokenTree::Punct(punct) if punct.as_char() == '*' => {
                    is_name = false;
                    found.push(Import { path: path.clone(), name: None, line });
                }
                TokenTree::Punct(_) | TokenTree::Literal(_) => {}
            }
        }
        if path.len() > 1 && path.last().is_some_and(|name| name == "self") {
            path.pop();
        }
        if is_name && line > 0 {
            let name = alias.or_else(|| path.last().cloned());
            found.push(Import { path, name, line });
        }
    }
}

/// The path that begins with `first`, and the number of tokens of `rest` that belong to it.
fn read_path(first: &Ident, rest: &[TokenTree]) -> (Vec<String>, usize) {
    let mut path = vec![plain(first)];
    let mut length = 0;
    while let [TokenTree::Punct(a), TokenTree::Punct(b), TokenTree::Ident(name), ..] = &rest[length..] {
        if a.as_char() != ':' || b.as_char() != ':' {
            break;
        }
        path.push(plain(name));
        length += 3;
    }
    (path, length)
}

/// True unless it is a single word that is more likely a variable, a field or a keyword than the name of an item.
fn may_be_path(path: &[String], rest: &[TokenTree]) -> bool {
    let [single] = path else { return true };
    let is_call = matches!(rest.first(), Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Parenthesis);
    single.starts_with(|first: char| first.is_uppercase()) || is_call || is_punct(rest.first(), '!')
}

/// True if a name after these tokens belongs to what precedes it: a field, a method, the rest of a path.
fn is_continued(before: &[TokenTree]) -> bool {
    let is_path = is_punct(before.last(), ':') && is_punct(before.iter().nth_back(1), ':');
    // Two dots are a range.
    let is_member = is_punct(before.last(), '.') && !is_punct(before.iter().nth_back(1), '.');
    is_path || is_member
}

/// True for the parentheses of `pub(crate)` and its like.
fn is_visibility(group: &Group, before: &[TokenTree]) -> bool {
    group.delimiter() == Delimiter::Parenthesis
        && matches!(before.last(), Some(TokenTree::Ident(word)) if word == "pub")
}

fn is_punct(token: Option<&TokenTree>, wanted: char) -> bool {
    matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == wanted)
}

/// A name without the prefix of a raw identifier.
fn plain(word: &Ident) -> String {
    let word = word.to_string();
    word.strip_prefix("r#").map_or(word.clone(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The uses in a crate of these files, as `from:line to`.
    fn uses_of(files: &[(&str, &str)]) -> Vec<String> {
        let read = |path: &str| files.iter().find(|(name, _)| *name == path).map(|(_, text)| (*text).to_owned());
        let found = uses("lib.rs", &read).unwrap();
        found.into_iter().map(|found| format!("{}:{} {}", found.from, found.line, found.to)).collect()
    }

    #[test]
    fn paths_lead_to_the_file_of_their_module() {
        for (path, to) in [
            ("use crate::b::X;", Some("b.rs")),
            ("use super::b::{self, X as Y};", Some("b.rs")),
            ("use self::c::X;", Some("a/c.rs")),
            ("use crate::a::c::{X, deeper::{Z}};", Some("a/c.rs")),
            ("fn f() { crate::b::g() }", Some("b.rs")),
            ("fn f(_: c::X) {}", Some("a/c.rs")),
            ("fn f() { info!(\"{}\", super::b::g()); }", Some("b.rs")),
            ("fn f() { x.b(0..super::b::N) }", Some("b.rs")),
            ("#[arg(value_parser = super::b::parse)] struct S;", Some("b.rs")),
            ("use super::b; fn f() { b::g::<u8>() }", Some("b.rs")),
            ("fn f() { use super::b; b::g() }", Some("b.rs")),
            ("use super::Own;", Some("lib.rs")),
            ("mod inline { use super::super::b::X; }", Some("b.rs")),
            ("mod inline { pub struct X; }\nuse inline::X;", None),
            ("use std::b::X; use crates::b::Y;", None),
            ("fn f(b: u8) { b; self.b(); other::b::X; <u8 as ::b::X>::f() }", None),
            ("// crate::b::X\nfn f() { \"crate::b::X\" }", None),
            ("pub(in crate::b) fn f() {}", None),
        ] {
            let a = format!("mod c; {path}");
            let files = [("lib.rs", "mod a; mod b;"), ("a.rs", &a), ("b.rs", ""), ("a/c.rs", "mod deeper {}")];
            let expected = to.map(|to| format!("a.rs:1 {to}"));
            assert_eq!(uses_of(&files).first(), expected.as_ref(), "{path}");
        }
    }

    #[test]
    fn re_exports_are_followed_and_are_no_use_by_a_parent() {
        for root in [
            "mod a; mod b; pub use b::X;",
            "mod a; mod b; pub(crate) use self::b::{X as X};",
            "mod a; mod b; pub use b::*;",
            "mod a; mod b; mod c { pub use super::b::X; } pub use c::X;",
        ] {
            for path in
                ["use crate::X;", "use super::{X};", "use super::*; fn f(_: X) {}", "fn f() { crate::X::new() }"]
            {
                let found = uses_of(&[("lib.rs", root), ("a.rs", path), ("b.rs", "pub struct X;")]);
                let found: Vec<_> = found.iter().filter(|found| !found.starts_with("lib.rs")).collect();
                assert_eq!(found, ["a.rs:1 b.rs"], "{root} {path}");
            }
        }
        assert_eq!(uses_of(&[("lib.rs", "mod b;\npub use b::X;"), ("b.rs", "pub struct X;")]), [""; 0]);
        let named = [("lib.rs", "mod b;\npub use b::X;\nstruct Own(X);"), ("b.rs", "pub struct X;")];
        assert_eq!(uses_of(&named), ["lib.rs:3 b.rs"]);
        let private = [("lib.rs", "mod b;\nuse b::X;"), ("b.rs", "pub struct X;")];
        assert_eq!(uses_of(&private), ["lib.rs:2 b.rs"]);
        let sibling = [("lib.rs", "mod a; mod b;"), ("a.rs", "pub use super::b::X;"), ("b.rs", "pub struct X;")];
        assert_eq!(uses_of(&sibling), ["a.rs:1 b.rs"]);
    }

    #[test]
    fn what_only_tests_build_is_left_out() {
        for tests in [
            "#[cfg(test)] mod absent;",
            "#[cfg(test)]\n#[allow(dead_code)]\nmod tests { use super::b::X; }",
            "#[cfg(all(test, unix))] use b::{X, Y};",
            "struct S { #[cfg(test)] x: b::X, y: u8 }",
            "impl S { #[cfg(test)] pub fn f<A, B>(x: b::X) -> b::X { b::g() } }",
            "#[test] fn f() { b::g() }",
            "#[cfg(test)] const X: b::X = b::X { y: 1 };",
            "fn f() { #[cfg(test)] b::g(); }",
        ] {
            assert_eq!(uses_of(&[("lib.rs", &format!("mod b; {tests}")), ("b.rs", "")]), [""; 0], "{tests}");
            let after = format!("mod b; {tests}\nfn after() {{ b::g() }}");
            assert_eq!(uses_of(&[("lib.rs", &after), ("b.rs", "")]).len(), 1, "{tests}");
        }
        assert_eq!(uses_of(&[("lib.rs", "mod b; #[cfg(not(test))] use b::X;"), ("b.rs", "")]).len(), 1);
        assert_eq!(uses_of(&[("lib.rs", "mod b;"), ("b.rs", "#![cfg(test)]\nuse crate::X;")]), [""; 0]);
    }

    #[test]
    fn a_folder_with_mod_rs_is_a_module_and_an_absent_file_is_named() {
        let files = [("lib.rs", "mod a; struct Own;"), ("a/mod.rs", "mod b;"), ("a/b.rs", "use crate::Own;")];
        assert_eq!(uses_of(&files), ["a/b.rs:1 lib.rs"]);
        let error = uses("lib.rs", &|path| (path == "lib.rs").then(|| "mod a;".to_owned())).unwrap_err();
        assert!(format!("{error:#}").contains("`mod a;` in lib.rs: a/mod.rs is not there"), "{error:#}");
    }

    #[test]
    fn names_that_import_themselves_end() {
        assert_eq!(
            uses_of(&[("lib.rs", "use x::x; use y; pub use crate::z; pub use self::*; fn f() { x(); y::q(); z() }")]),
            [""; 0]
        );
    }
}
