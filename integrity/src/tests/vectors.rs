//! Guards and combinations from other implementations and the specifications (`proofs/vectors`).

use super::noise;
use crate::{GuardKind, combine, guard};

const SPEC: &str = include_str!("../../../proofs/vectors/spec.txt");
const GUARDS: &str = include_str!("../../../proofs/vectors/guards.txt");
const COMBINE: &str = include_str!("../../../proofs/vectors/combine.txt");

/// The lines of a file that are not comments, split into their columns.
fn rows<const COLUMNS: usize>(file: &'static str) -> impl Iterator<Item = [&'static str; COLUMNS]> {
    let lines = file.lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| line.split(' ').collect::<Vec<_>>().try_into().unwrap())
}

fn kind(name: &str) -> GuardKind {
    GuardKind::ALL.into_iter().find(|kind| kind.as_str() == name).unwrap()
}

fn hex(digits: &str) -> u64 {
    u64::from_str_radix(digits, 16).unwrap()
}

/// The bytes of an input, in the notation that the README of the vectors describes.
fn input(text: &str) -> Vec<u8> {
    if let Some(text) = text.strip_prefix("text:") {
        return text.as_bytes().to_vec();
    }
    if let Some(digits) = text.strip_prefix("hex:") {
        return (0..digits.len() / 2).map(|i| hex(&digits[2 * i..2 * i + 2]) as u8).collect();
    }
    let (pattern, bytes) = text.split_once('*').unwrap();
    let bytes = bytes.parse().unwrap();
    match pattern.split_once(':') {
        None if pattern == "up" => (0..bytes).map(|i| i as u8).collect(),
        None if pattern == "down" => (0..bytes).map(|i| !(i as u8)).collect(),
        Some(("byte", value)) => vec![hex(value) as u8; bytes],
        Some(("noise", seed)) => noise(seed.parse().unwrap(), bytes),
        _ => panic!("unknown input {text}"),
    }
}

/// Compares every line with our guard; returns how many lines there were of each kind.
fn hold(file: &'static str) -> [usize; 4] {
    let mut seen = [0; 4];
    for [name, text, expected] in rows(file) {
        let bytes = input(text);
        let actual = guard::compute(kind(name), &bytes);
        assert_eq!(actual, hex(expected), "{name} of {text}: {actual:x} here, {expected} there");
        seen[kind(name) as usize] += 1;
    }
    seen
}

#[test]
fn guards_are_those_of_the_specifications() {
    assert_eq!(hold(SPEC), [1, 6, 5, 1]);
}

#[test]
fn guards_are_those_of_foreign_implementations() {
    assert_eq!(hold(GUARDS), [48; 4]);
}

#[test]
fn combinations_are_those_of_foreign_implementations() {
    let mut seen = 0;
    for [name, first, second, bytes, whole] in rows(COMBINE) {
        let (a, b, bytes) = (hex(first), hex(second), bytes.parse().unwrap());
        let (plain, tables) = match kind(name) {
            GuardKind::Crc16 => {
                let tables = combine::Combiner::<combine::Crc16>::new(bytes).join(a as u16, b as u16);
                (u64::from(combine::crc16(a as u16, b as u16, bytes)), u64::from(tables))
            }
            GuardKind::Crc32c => {
                let tables = combine::Combiner::<combine::Crc32c>::new(bytes).join(a as u32, b as u32);
                (u64::from(combine::crc32c(a as u32, b as u32, bytes)), u64::from(tables))
            }
            GuardKind::Crc64 => {
                (combine::crc64(a, b, bytes), combine::Combiner::<combine::Crc64>::new(bytes).join(a, b))
            }
            GuardKind::IpChecksum => panic!("the IP checksum has no combination"),
        };
        assert_eq!((plain, tables), (hex(whole), hex(whole)), "{name} {first} {second} {bytes}");
        seen += 1;
    }
    assert_eq!(seen, 26);
}
