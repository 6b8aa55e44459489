//! Golden images as they lie in the tree: the files of a case, without what is zero in them, compressed; and the table of a set.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use sha2::{Digest, Sha256};

/// What is left out is zero in such pieces.
const PIECE: usize = 512;

/// A case as the table of its set has it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Row {
    pub name: String,
    /// Exit status of `verify` and of `copy --salvage` as it was stored, and of `verify` after a change.
    pub verify: i32,
    pub copy: i32,
    pub after: i32,
    pub digest: String,
    pub target: String,
}

/// The folder with a folder for each set.
pub fn sets() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

/// The rows of a set.
pub fn table(set: &Path) -> Vec<Row> {
    let text = fs::read_to_string(set.join("table")).unwrap();
    let rows = text.lines().filter(|line| !line.starts_with('#'));
    rows.map(|line| row(line).unwrap_or_else(|| panic!("{}: '{line}' is no row", set.display()))).collect()
}

fn row(line: &str) -> Option<Row> {
    let mut words = line.split_whitespace();
    let name = words.next()?.to_owned();
    let mut status = || words.next()?.parse().ok();
    let (verify, copy, after) = (status()?, status()?, status()?);
    let (digest, target) = (words.next()?.to_owned(), words.next()?.to_owned());
    words.next().is_none().then_some(Row { name, verify, copy, after, digest, target })
}

/// Writes the table of a set.
pub fn write_table(set: &Path, rows: &[Row]) {
    let mut text =
        "# case, exit status of verify, of copy and of verify after a change, digest of the content, target\n"
            .to_owned();
    for Row { name, verify, copy, after, digest, target } in rows {
        text += &format!("{name} {verify} {copy} {after} {digest} {target}\n");
    }
    fs::write(set.join("table"), text).unwrap();
}

/// Packs these files of a folder.
pub fn pack(folder: &Path, names: &[&str]) -> Vec<u8> {
    let mut packed = GzEncoder::new(Vec::new(), Compression::best());
    for name in names {
        let bytes = fs::read(folder.join(name)).unwrap();
        writeln!(packed, "file {name} {}", bytes.len()).unwrap();
        let mut at = 0;
        while at < bytes.len() {
            let length = run_length(&bytes[at..]);
            if length > 0 {
                writeln!(packed, "at {at} {length}").unwrap();
                packed.write_all(&bytes[at..at + length]).unwrap();
            }
            at += length.max(PIECE);
        }
    }
    packed.finish().unwrap()
}

/// Bytes at the start that belong to pieces that are not zero.
fn run_length(bytes: &[u8]) -> usize {
    bytes.chunks(PIECE).take_while(|piece| !is_zero(piece)).map(<[u8]>::len).sum()
}

/// As one comparison: large files are mostly zero.
fn is_zero(piece: &[u8]) -> bool {
    *piece == [0; PIECE][..piece.len()]
}

/// Makes the files of a case in a folder.
pub fn unpack(packed: &[u8], folder: &Path) {
    let mut bytes = Vec::new();
    GzDecoder::new(packed).read_to_end(&mut bytes).unwrap();
    let (mut rest, mut file): (&[u8], Option<File>) = (&bytes, None);
    while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
        let line = std::str::from_utf8(&rest[..end]).unwrap();
        rest = &rest[end + 1..];
        match line.split(' ').collect::<Vec<_>>()[..] {
            ["file", name, length] => {
                let new = File::create_new(folder.join(name)).unwrap();
                new.set_len(length.parse().unwrap()).unwrap();
                file = Some(new);
            }
            ["at", offset, length] => {
                let (data, behind) = rest.split_at(length.parse().unwrap());
                let file = file.as_mut().unwrap();
                file.seek(SeekFrom::Start(offset.parse().unwrap())).unwrap();
                file.write_all(data).unwrap();
                rest = behind;
            }
            _ => panic!("'{line}' is no line of a packed case"),
        }
    }
    assert!(rest.is_empty(), "a packed case is cut off");
}

/// A digest of a content, in which zeroes at the end and holes make no difference.
pub fn digest(content: &[u8]) -> String {
    let mut hash = Sha256::new();
    for (at, piece) in content.chunks(PIECE).enumerate() {
        if !is_zero(piece) {
            hash.update((at as u64).to_le_bytes());
            hash.update(piece);
        }
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn what_is_packed_is_unpacked_with_its_holes() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut bytes = vec![0; 5 * PIECE + 7];
    bytes[PIECE] = 1;
    bytes[2 * PIECE - 1] = b'\n';
    bytes[5 * PIECE] = 2;
    fs::write(from.path().join("a"), &bytes).unwrap();
    fs::write(from.path().join("b"), vec![0; 9]).unwrap();
    unpack(&pack(from.path(), &["a", "b"]), to.path());
    assert_eq!(fs::read(to.path().join("a")).unwrap(), bytes);
    assert_eq!(fs::read(to.path().join("b")).unwrap(), [0; 9]);
    assert_ne!(digest(&bytes), digest(&bytes[PIECE..]), "places count");
}
