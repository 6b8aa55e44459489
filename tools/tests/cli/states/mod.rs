//! What each command says in each state, and its exit status, as `docs/states.md` has it: an operator who reads one state from top to
//! bottom must find no two commands that contradict each other, and no word that is not true of every block and copy.
//!
//! `SEALBLOCK_WRITE_DOCS=1 cargo test -p sealblock --test cli states` writes the document.

mod commands;
mod scenes;
mod words;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::sync::Mutex;
use std::thread;

use commands::{Row, ask};
use scenes::{Scene, scenes};

/// The document.
const DOCUMENT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/states.md");
/// States that are asked at once: commands mostly wait.
const AT_ONCE: usize = 4;

const HEAD: &str = include_str!("head.md");

#[test]
fn each_command_says_of_each_state_what_the_table_has() {
    let scenes = scenes();
    let (next, asked) = (Mutex::new(0..scenes.len()), Mutex::new(BTreeMap::new()));
    let take = || next.lock().unwrap().next();
    thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some(at) = take() {
                    let rows = ask(&scenes[at]);
                    asked.lock().unwrap().insert(at, rows);
                }
            });
        }
    });
    let asked: Vec<Vec<Row>> = asked.into_inner().unwrap().into_values().collect();
    assert_eq!(asked.len(), scenes.len());
    let now = document(&scenes, &asked);
    if std::env::var_os("SEALBLOCK_WRITE_DOCS").is_some() {
        fs::write(DOCUMENT, &now).unwrap();
    }
    let before = fs::read_to_string(DOCUMENT).unwrap_or_default();
    let differing: Vec<String> = now
        .lines()
        .filter(|line| !before.lines().any(|other| other == *line))
        .map(|line| format!("now: {line}"))
        .chain(
            before.lines().filter(|line| !now.lines().any(|other| other == *line)).map(|line| format!("was: {line}")),
        )
        .collect();
    assert!(
        now == before,
        "docs/states.md is not what the program does; SEALBLOCK_WRITE_DOCS=1 writes it:\n{}",
        differing.join("\n")
    );
}

/// The whole document.
fn document(scenes: &[Scene], asked: &[Vec<Row>]) -> String {
    let mut text = HEAD.to_owned();
    let key = |row: &Row| format!("{}`{}`", row.part, row.command);
    let mut keys: Vec<String> = Vec::new();
    for rows in asked {
        let mut after = 0;
        for key in rows.iter().map(key) {
            match keys.iter().position(|known| *known == key) {
                Some(at) => after = at + 1,
                None => {
                    keys.insert(after, key);
                    after += 1;
                }
            }
        }
    }
    text.push_str("\n## Exit statuses\n\n");
    for (at, scene) in scenes.iter().enumerate() {
        let _ = writeln!(text, "{}. [{}](#{})", at + 1, scene.title, anchor(scene.title));
    }
    let numbers: Vec<String> = (1..=scenes.len()).map(|number| number.to_string()).collect();
    let _ = writeln!(text, "\n| command | {} |\n| --- |{}", numbers.join(" | "), " ---: |".repeat(scenes.len()));
    for wanted in &keys {
        let statuses = asked.iter().map(|rows| {
            let found: Vec<&str> = rows.iter().filter(|row| key(row) == *wanted).map(|row| &row.status[..]).collect();
            if found.is_empty() { "-".to_owned() } else { found.join(", ") }
        });
        let _ = writeln!(text, "| {wanted} | {} |", statuses.collect::<Vec<_>>().join(" | "));
    }
    for (scene, rows) in scenes.iter().zip(asked) {
        let _ = writeln!(
            text,
            "\n## {}\n\n{}\n\n| command | exit | words |\n| --- | ---: | --- |",
            scene.title, scene.about
        );
        for row in rows {
            let _ = writeln!(text, "| {} | {} | {} |", key(row), row.status, row.words);
        }
    }
    text
}

/// What a heading is linked by.
fn anchor(title: &str) -> String {
    title.chars().filter(|letter| *letter != ',').map(|letter| if letter == ' ' { '-' } else { letter }).collect()
}
