//! The last warnings and errors, for `status`.
//!
//! Bounded: [`MAX_LINES`] for each call site, so that one that
//! logs much does not push out the lines of the others.

use std::collections::{HashMap, VecDeque};
use std::sync::{LazyLock, Mutex, PoisonError};

use serde_json::{Map, Value};
use tracing::callsite::Identifier;

/// Lines that are kept of one place of the program.
const MAX_LINES: usize = 8;
/// Characters that are kept of one text.
const MAX_CHARACTERS: usize = 300;

static RECENT: LazyLock<Mutex<Recent>> = LazyLock::new(Mutex::default);

/// The last lines of a place of the program, each with its number among all.
type Lines = VecDeque<(u64, Map<String, Value>)>;

/// Lines by call site.
#[derive(Default)]
struct Recent {
    told: u64,
    by_place: HashMap<Identifier, Lines>,
}

/// Keeps a line.
pub fn keep(place: Identifier, line: &Map<String, Value>) {
    let mut recent = RECENT.lock().unwrap_or_else(PoisonError::into_inner);
    recent.told += 1;
    let number = recent.told;
    put(recent.by_place.entry(place).or_default(), number, line);
}

fn put(lines: &mut Lines, number: u64, line: &Map<String, Value>) {
    if lines.len() >= MAX_LINES {
        lines.pop_front();
    }
    lines.push_back((number, line.iter().map(|(name, value)| (name.clone(), cut(value))).collect()));
}

fn cut(value: &Value) -> Value {
    match value {
        Value::String(text) => Value::from(text.chars().take(MAX_CHARACTERS).collect::<String>()),
        other => other.clone(),
    }
}

/// The last lines, at most so many, oldest first.
pub fn last(most: usize) -> Vec<Map<String, Value>> {
    let recent = RECENT.lock().unwrap_or_else(PoisonError::into_inner);
    let mut lines: Vec<_> = recent.by_place.values().flatten().collect();
    lines.sort_unstable_by_key(|(number, _)| *number);
    lines[lines.len().saturating_sub(most)..].iter().map(|(_, line)| line.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_that_tells_much_keeps_its_last_lines_and_no_long_ones() {
        let mut lines = VecDeque::new();
        for number in 0..100 {
            let text = "x".repeat(10_000);
            let line = Map::from_iter([("n".to_owned(), number.into()), ("text".to_owned(), Value::from(text))]);
            put(&mut lines, number, &line);
        }
        assert_eq!((lines.len(), lines[0].0, lines[MAX_LINES - 1].0), (MAX_LINES, 100 - MAX_LINES as u64, 99));
        assert_eq!(lines[0].1["text"].as_str().map(str::len), Some(MAX_CHARACTERS));
    }
}
