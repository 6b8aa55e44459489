//! What is in one Rust source: its length, its functions, and words that are not allowed.
//!
//! It works on tokens, not on text or a syntax tree: comments and strings cannot deceive it, and functions inside
//! macros such as `proptest!`, which a syntax tree does not show, count like any other.

use std::str::FromStr;

use anyhow::{Result, anyhow};
use proc_macro2::{Delimiter, Group, Ident, Span, TokenStream, TokenTree};

/// A function with a body.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// The line of its `fn`, counted from 1.
    pub line: usize,
    /// Lines from its `fn` to its closing brace, both included.
    pub length_lines: usize,
}

/// A restricted word, and its line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Word {
    /// Which word.
    pub word: Restricted,
    /// Its line, counted from 1.
    pub line: usize,
}

/// Words that only some folders, or none, may use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Restricted {
    /// The keyword `unsafe`, in a block, a function, an implementation or an attribute.
    Unsafe,
    /// `todo!` or `unimplemented!`.
    Unfinished,
    /// The attribute that disables a test.
    IgnoredTest,
}

/// What was found in one file.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Source {
    /// Lines of the file.
    pub length_lines: usize,
    /// Its functions, in order, nested ones included.
    pub functions: Vec<Function>,
    /// Its restricted words, in order.
    pub words: Vec<Word>,
}

/// Reads a source. If it is not a sequence of Rust tokens.
pub fn scan(text: &str) -> Result<Source> {
    let tokens = TokenStream::from_str(text).map_err(|error| anyhow!("not Rust: {error}"))?;
    let mut source = Source { length_lines: text.lines().count(), ..Source::default() };
    walk(tokens, &mut source);
    Ok(source)
}

fn walk(tokens: TokenStream, source: &mut Source) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    for (at, token) in tokens.iter().enumerate() {
        let rest = &tokens[at + 1..];
        match token {
            TokenTree::Ident(ident) => identifier(ident, rest, source),
            TokenTree::Punct(punct) if punct.as_char() == '#' => attribute(rest, source),
            TokenTree::Group(group) => walk(group.stream(), source),
            TokenTree::Punct(_) | TokenTree::Literal(_) => {}
        }
    }
}

fn identifier(ident: &Ident, rest: &[TokenTree], source: &mut Source) {
    let line = line_of(ident.span());
    if ident == "unsafe" {
        source.words.push(Word { word: Restricted::Unsafe, line });
    } else if ident == "todo" || ident == "unimplemented" {
        if matches!(rest.first(), Some(TokenTree::Punct(punct)) if punct.as_char() == '!') {
            source.words.push(Word { word: Restricted::Unfinished, line });
        }
    } else if ident == "fn" {
        source.functions.extend(function(line, rest));
    }
}

/// The function that a `fn` on `line` begins; `None` for a function pointer or a function without a body.
fn function(line: usize, rest: &[TokenTree]) -> Option<Function> {
    let [TokenTree::Ident(name), header @ ..] = rest else { return None };
    let body = body(header)?;
    let end = body.span_close().end().line;
    Some(Function { name: name.to_string(), line, length_lines: end + 1 - line })
}

/// The first braces that are a body. A constant in a generic argument, such as `Foo<{ N }>`, also has braces; the
/// tokens after them distinguish it from a body that follows the last comma of a `where` clause.
fn body(header: &[TokenTree]) -> Option<&Group> {
    let ends_argument =
        |token: Option<&TokenTree>| matches!(token, Some(TokenTree::Punct(p)) if matches!(p.as_char(), '>' | ','));
    for (at, token) in header.iter().enumerate() {
        match token {
            TokenTree::Group(group) if group.delimiter() == Delimiter::Brace && !ends_argument(header.get(at + 1)) => {
                return Some(group);
            }
            TokenTree::Punct(punct) if punct.as_char() == ';' => return None,
            _ => {}
        }
    }
    None
}

fn attribute(rest: &[TokenTree], source: &mut Source) {
    let rest = match rest {
        [TokenTree::Punct(bang), rest @ ..] if bang.as_char() == '!' => rest,
        rest => rest,
    };
    let Some(TokenTree::Group(group)) = rest.first() else { return };
    if group.delimiter() == Delimiter::Bracket && names_ignore(group.stream()) {
        source.words.push(Word { word: Restricted::IgnoredTest, line: line_of(group.span()) });
    }
}

/// True if an attribute is `ignore`, or sets it conditionally.
fn names_ignore(attribute: TokenStream) -> bool {
    let mut tokens = attribute.into_iter();
    let Some(TokenTree::Ident(first)) = tokens.next() else { return false };
    if first == "ignore" {
        return true;
    }
    let inside = |token| match token {
        TokenTree::Group(group) => group.stream().into_iter().any(|token| token.to_string() == "ignore"),
        _ => false,
    };
    first == "cfg_attr" && tokens.any(inside)
}

fn line_of(span: Span) -> usize {
    span.start().line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn functions(text: &str) -> Vec<(String, usize, usize)> {
        scan(text).unwrap().functions.into_iter().map(|f| (f.name, f.line, f.length_lines)).collect()
    }

    fn words(text: &str) -> Vec<(Restricted, usize)> {
        scan(text).unwrap().words.into_iter().map(|w| (w.word, w.line)).collect()
    }

    #[test]
    fn a_function_reaches_from_fn_to_its_closing_brace() {
        let text = "/// Doc.\n#[inline]\npub fn a(\n  x: u8,\n) -> u8\nwhere\n  u8: Copy,\n{\n  x\n}\nfn b() {}\n";
        assert_eq!(functions(text), [("a".to_owned(), 3, 8), ("b".to_owned(), 11, 1)]);
    }

    #[test]
    fn functions_in_functions_macros_and_traits_count() {
        let text = "trait T {\n  fn absent(&self);\n  fn given(&self) {\n  }\n}\nproptest! {\n #[test]\n fn p(x in 0..9) {\n }\n}\n\
                    fn outer() {\n  fn inner() {}\n}\n";
        let names: Vec<_> = functions(text).into_iter().map(|(name, _, lines)| (name, lines)).collect();
        let expected = [("given", 2), ("p", 2), ("outer", 3), ("inner", 1)];
        assert_eq!(names, expected.map(|(name, lines)| (name.to_owned(), lines)));
    }

    #[test]
    fn pointers_and_constants_in_generics_are_no_bodies() {
        assert_eq!(functions("type F = fn(u8) -> u8;"), []);
        assert_eq!(functions("fn a() -> Foo<{ 1 }> {\n}"), [("a".to_owned(), 1, 2)]);
    }

    #[test]
    fn restricted_words_are_found_in_code() {
        assert_eq!(words("fn a() {\n unsafe { b() }\n}"), [(Restricted::Unsafe, 2)]);
        assert_eq!(words("fn a() { todo!() }\nfn b() { std::unimplemented!(\"x\") }").len(), 2);
        assert_eq!(words("#[test]\n#[ignore = \"slow\"]\nfn a() {}"), [(Restricted::IgnoredTest, 2)]);
        assert_eq!(words("#[cfg_attr(miri, ignore)]\nfn a() {}"), [(Restricted::IgnoredTest, 1)]);
    }

    #[test]
    fn restricted_words_in_text_are_not() {
        let text = "// unsafe todo!\n/// #[ignore]\nfn a() { let _ = \"unsafe todo!() #[ignore]\"; }\n#![allow(unsafe_code)]\n\
                    fn todo() {}\n#[cfg(ignore_me)] fn ignore() {}";
        assert_eq!(words(text), []);
    }

    #[test]
    fn what_is_not_rust_is_refused() {
        assert!(scan("fn a() { ").is_err());
    }
}
