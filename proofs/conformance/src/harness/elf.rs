//! Which shared libraries a program needs, read from the program: nothing is run, so that programs of another system can be
//! examined.
//!
//! Only 64-bit little-endian files are understood, which is what the guests run. Anything that does not add up reads as "needs
//! nothing"; a library that is really missing shows when the guest starts the program.

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

const PROGRAM_LOAD: u32 = 1;
const PROGRAM_DYNAMIC: u32 = 2;
const PROGRAM_INTERPRETER: u32 = 3;
const TAG_NEEDED: u64 = 1;
const TAG_STRINGS: u64 = 5;

/// What an ELF file asks for.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// The program that loads it, as a path.
    pub interpreter: Option<String>,
    /// Names of libraries.
    pub libraries: Vec<String>,
}

/// One entry of the program header table: type, offset in the file, address, bytes in the file.
struct Segment {
    kind: u32,
    offset: u64,
    address: u64,
    bytes: u64,
}

/// Reads what a file asks for; nothing if it is no ELF file of the kind above.
pub fn needs(file: &[u8]) -> Needs {
    try_needs(file).unwrap_or_default()
}

fn try_needs(file: &[u8]) -> Option<Needs> {
    // Magic, 64-bit, little-endian.
    if !file.starts_with(&[0x7F, b'E', b'L', b'F', 2, 1]) {
        return None;
    }
    let table = number(file, 32, 8)?;
    let (entry_bytes, entries) = (number(file, 54, 2)?, number(file, 56, 2)?);
    let segments: Option<Vec<Segment>> = (0..entries)
        .map(|i| {
            let at = usize::try_from(table.checked_add(i * entry_bytes)?).ok()?;
            let field = |offset| number(file, at.checked_add(offset)?, 8);
            Some(Segment {
                kind: number(file, at, 4)? as u32,
                offset: field(8)?,
                address: field(16)?,
                bytes: field(32)?,
            })
        })
        .collect();
    let segments = segments?;
    let interpreter = segments.iter().find(|segment| segment.kind == PROGRAM_INTERPRETER);
    let interpreter = interpreter.and_then(|segment| text(file, segment.offset));
    let libraries = libraries(file, &segments).unwrap_or_default();
    Some(Needs { interpreter, libraries })
}

fn libraries(file: &[u8], segments: &[Segment]) -> Option<Vec<String>> {
    let dynamic = segments.iter().find(|segment| segment.kind == PROGRAM_DYNAMIC)?;
    let entry = |i: u64| -> Option<(u64, u64)> {
        let at = usize::try_from(dynamic.offset.checked_add(i * 16)?).ok()?;
        Some((number(file, at, 8)?, number(file, at + 8, 8)?))
    };
    let entries: Vec<(u64, u64)> = (0..dynamic.bytes / 16).map_while(entry).collect();
    let strings = entries.iter().find(|(tag, _)| *tag == TAG_STRINGS)?.1;
    let load = segments.iter().filter(|segment| segment.kind == PROGRAM_LOAD);
    let segment = load.into_iter().find(|s| strings.checked_sub(s.address).is_some_and(|offset| offset < s.bytes))?;
    let base = segment.offset.checked_add(strings - segment.address)?;
    let needed = entries.iter().filter(|(tag, _)| *tag == TAG_NEEDED);
    needed.map(|(_, offset)| text(file, base.checked_add(*offset)?)).collect()
}

fn number(file: &[u8], at: usize, bytes: usize) -> Option<u64> {
    let field = file.get(at..at.checked_add(bytes)?)?;
    Some(field.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
}

fn text(file: &[u8], at: u64) -> Option<String> {
    let rest = file.get(usize::try_from(at).ok()?..)?;
    let end = rest.iter().position(|byte| *byte == 0)?;
    String::from_utf8(rest[..end].to_vec()).ok()
}

/// All libraries that these programs need, directly or not: their names in the guest (relative to its root), and where they
/// are here. `folders` are searched in order.
///
/// # Errors
/// When a program cannot be read or a library is nowhere.
pub fn closure(programs: &[PathBuf], folders: &[PathBuf]) -> Result<BTreeMap<String, PathBuf>> {
    let mut found = BTreeMap::new();
    let mut queue: VecDeque<PathBuf> = programs.iter().cloned().collect();
    while let Some(path) = queue.pop_front() {
        let file = fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
        let needs = needs(&file);
        for name in needs.libraries.iter().chain(&needs.interpreter) {
            let short = name.rsplit('/').next().unwrap_or(name);
            let in_guest =
                if name.contains('/') { name.trim_start_matches('/').to_owned() } else { format!("lib/{name}") };
            if found.contains_key(&in_guest) {
                continue;
            }
            let Some(library) = locate(short, folders) else {
                bail!("{} needs {name}, which is nowhere", path.display())
            };
            queue.push_back(library.clone());
            found.insert(in_guest, library);
        }
    }
    Ok(found)
}

fn locate(name: &str, folders: &[PathBuf]) -> Option<PathBuf> {
    folders.iter().map(|folder| folder.join(name)).find(|path| Path::is_file(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_program_needs_a_c_library_and_a_loader() {
        let file = fs::read(std::env::current_exe().unwrap()).unwrap();
        let needs = needs(&file);
        assert!(needs.libraries.iter().any(|name| name.starts_with("libc.so")), "{needs:?}");
        assert!(needs.interpreter.is_some_and(|path| path.contains("ld-linux")));
    }

    #[test]
    fn what_is_no_program_needs_nothing() {
        let good = fs::read(std::env::current_exe().unwrap()).unwrap();
        assert_eq!(needs(b"#!/bin/sh\n"), Needs::default());
        // Cut anywhere, it must not be read beyond its end.
        for len in (0..2000).chain([good.len() / 2]) {
            needs(&good[..len]);
        }
    }

    #[test]
    fn a_library_that_is_nowhere_is_named() {
        let program = std::env::current_exe().unwrap();
        let error = closure(&[program], &[PathBuf::from("/nonexistent")]).unwrap_err().to_string();
        assert!(error.contains("which is nowhere"), "{error}");
    }
}
