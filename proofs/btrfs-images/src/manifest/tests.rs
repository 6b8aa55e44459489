//! Checks that each differing field is reported, that equal manifests have no difference, and that the text form can be
//! read back.

use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::time::{Duration, UNIX_EPOCH};

use sha2::{Digest, Sha256};

use super::difference::MAX_DIFFERENCES;
use super::*;

fn entry() -> Entry {
    Entry {
        kind: Kind::Regular,
        mode: 0o4755,
        uid: 1000,
        gid: 1001,
        nlink: 2,
        size: 10,
        atime: Time { seconds: -1, nanoseconds: 999_999_999 },
        mtime: Time { seconds: 1, nanoseconds: 2 },
        ctime: Time { seconds: 3, nanoseconds: 0 },
        device: (8, 1),
        target: Some(b"to here".to_vec()),
        content: Some([7; 32]),
        xattrs: [(b"user.a=b".to_vec(), b"value\0".to_vec()), (b"user.empty".to_vec(), Vec::new())].into(),
        same_as: None,
    }
}

fn manifest(entries: &[(&[u8], Entry)]) -> Manifest {
    Manifest { entries: entries.iter().map(|(path, entry)| (path.to_vec(), entry.clone())).collect() }
}

type Change = fn(&mut Entry);

/// Every field, with a change to it.
const CHANGES: [(&str, Change); 15] = [
    ("kind", |entry| entry.kind = Kind::Fifo),
    ("mode", |entry| entry.mode = 0o755),
    ("uid", |entry| entry.uid += 1),
    ("gid", |entry| entry.gid += 1),
    ("nlink", |entry| entry.nlink += 1),
    ("size", |entry| entry.size += 1),
    ("atime", |entry| entry.atime.seconds += 1),
    ("mtime", |entry| entry.mtime.nanoseconds += 1),
    ("ctime", |entry| entry.ctime.nanoseconds += 1),
    ("device", |entry| entry.device.1 += 1),
    ("target", |entry| entry.target = Some(b"to there".to_vec())),
    ("content", |entry| entry.content = None),
    ("xattr user.a%3db", |entry| entry.xattrs.values_mut().for_each(|value| value.push(1))),
    ("xattr user.empty", |entry| drop(entry.xattrs.pop_last())),
    ("same inode as", |entry| entry.same_as = Some(b"first".to_vec())),
];

#[test]
fn equal_manifests_have_no_difference_and_each_changed_field_is_named() {
    let expected = manifest(&[(b"path", entry())]);
    assert_eq!(expected.difference(&expected.clone()), Vec::<String>::new());
    for (field, change) in CHANGES {
        let mut changed = entry();
        change(&mut changed);
        for (one, other) in [(entry(), changed.clone()), (changed, entry())] {
            let lines = manifest(&[(b"path", one)]).difference(&manifest(&[(b"path", other)]));
            let named = lines.iter().any(|line| line.starts_with(&format!("path: {field}: expected ")));
            assert!(named, "{field}: {lines:?}");
            let others = lines.len() - 1;
            assert!(others == 0 || field.starts_with("xattr user.a"), "{field}: {lines:?}");
        }
    }
}

#[test]
fn paths_that_are_missing_or_not_expected_are_named() {
    let expected = manifest(&[(b"a", entry()), (b"b\n", entry())]);
    let found = manifest(&[(b"a", entry()), (b"", entry())]);
    assert_eq!(expected.difference(&found), ["b%0a: missing", "(empty): not expected"]);
}

#[test]
fn a_difference_is_bounded_in_lines_and_in_their_length() {
    let paths = |count: usize| -> Manifest {
        Manifest { entries: (0..count).map(|number| (number.to_string().into_bytes(), entry())).collect() }
    };
    assert_eq!(paths(MAX_DIFFERENCES).difference(&Manifest::default()).len(), MAX_DIFFERENCES);
    let lines = paths(MAX_DIFFERENCES + 5).difference(&Manifest::default());
    assert_eq!(lines.len(), MAX_DIFFERENCES + 1);
    assert_eq!(lines[MAX_DIFFERENCES], "and 5 more differences");

    let (mut one, mut other) = (entry(), entry());
    one.target = Some([&[b'x'; 3000][..], b"one"].concat());
    other.target = Some([&[b'x'; 3000][..], b"other"].concat());
    let lines = manifest(&[(b"a", one)]).difference(&manifest(&[(b"a", other)]));
    assert!(lines[0].contains("xone, found ") && lines[0].ends_with("xother") && lines[0].len() < 600, "{lines:?}");
}

#[test]
fn text_comes_back_whatever_names_and_values_are() {
    let all: Vec<u8> = (0..=255).collect();
    let mut odd = entry();
    odd.target = Some(all.clone());
    odd.same_as = Some(b"-".to_vec());
    odd.xattrs.insert(all.clone(), all.clone());
    let mut bare = Entry { target: None, content: None, xattrs: BTreeMap::new(), ..entry() };
    bare.kind = Kind::Directory;
    let manifest = manifest(&[(b"", bare.clone()), (&all, odd.clone()), (b"-", bare), (b"-e", odd)]);
    let text = manifest.to_text();
    assert!(text.is_ascii() && text.lines().count() == 5, "{text}");
    assert_eq!(Manifest::from_text(&text).unwrap(), manifest);
    assert_eq!(Manifest::from_text("sealblock manifest 1\n").unwrap(), Manifest::default());
}

#[test]
fn text_that_is_none_is_refused_for_its_reason() {
    let good = manifest(&[(b"path", Entry { xattrs: BTreeMap::new(), ..entry() })]).to_text();
    let line = good.lines().nth(1).unwrap().to_owned();
    let with = |from: &str, to: &str| {
        assert!(line.contains(from), "{line}");
        format!("sealblock manifest 1\n{}\n", line.replacen(from, to, 1))
    };
    let digest = "07".repeat(32);
    for (text, why) in [
        (String::new(), "not a manifest"),
        ("sealblock manifest 2\n".to_owned(), "not a manifest"),
        (with("path ", "%g0 "), "line 2: %g0: two hexadecimal"),
        (with("path ", "%4 "), "two hexadecimal"),
        (with("path ", "- "), "no path"),
        (with(" file ", " files "), "unknown kind files"),
        (with(" 4755 ", " 4758 "), "mode 4758"),
        (with(" 1000 ", " x "), "uid x"),
        (with(" 1001 ", " 4294967296 "), "gid 4294967296"),
        (with("-1.999999999", "-1"), "atime -1"),
        (with("8:1", "8"), "device 8"),
        (with(&digest, &digest[1..]), "64 hexadecimal digits"),
        (with(&digest, &digest.replace('7', "g")), "64 hexadecimal digits"),
        (with(&format!(" {digest}"), ""), "no content"),
        (with(&digest, &format!("{digest} user.a")), "attribute user.a: no ="),
        (format!("{good}{line}\n"), "line 3: a path that was there before"),
    ] {
        let error = Manifest::from_text(&text).unwrap_err();
        assert!(error.contains(why), "{why}: {error}");
    }
}

#[test]
fn a_folder_is_read_with_all_that_is_below_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::create_dir_all(path("deep/er")).unwrap();
    fs::write(path("deep/er/file"), b"content").unwrap();
    fs::hard_link(path("deep/er/file"), path("a name")).unwrap();
    fs::set_permissions(path("a name"), fs::Permissions::from_mode(0o4640)).unwrap();
    let time = UNIX_EPOCH - Duration::new(5, 500);
    File::open(path("a name")).unwrap().set_modified(time).unwrap();
    symlink("nowhere\n", path("link")).unwrap();

    let manifest = Manifest::scan(folder.path()).unwrap();
    let paths: Vec<_> = manifest.entries.keys().map(|path| String::from_utf8_lossy(path)).collect();
    assert_eq!(paths, ["", "a name", "deep", "deep/er", "deep/er/file", "link"]);
    let file = &manifest.entries[&b"a name"[..]];
    assert_eq!((file.kind, file.mode, file.nlink, file.size), (Kind::Regular, 0o4640, 2, 7));
    assert_eq!(file.mtime, Time { seconds: -6, nanoseconds: 999_999_500 });
    assert_eq!(file.content, Some(Sha256::digest(b"content").into()));
    let other = &manifest.entries[&b"deep/er/file"[..]];
    // Reading one may have updated the access time before the other was read.
    let expected = Entry { same_as: Some(b"a name".to_vec()), atime: other.atime, ..file.clone() };
    assert_eq!(other, &expected);
    assert_eq!(manifest.entries[&b"link"[..]].target.as_deref(), Some(&b"nowhere\n"[..]));
    assert_eq!(manifest.entries[&b""[..]].kind, Kind::Directory);

    let below = manifest.below(b"deep");
    assert_eq!(below.entries.keys().map(Vec::as_slice).collect::<Vec<_>>(), [&b""[..], b"er", b"er/file"]);
    assert_eq!(below.entries[&b"er/file"[..]].same_as, None, "its other name is not below");
    assert_eq!(manifest.below(b"dee").entries.len(), 0);
    assert_eq!(manifest.below(b""), manifest);
    assert!(Manifest::scan(&path("absent")).unwrap_err().contains("absent"));
}

#[test]
fn twenty_gibibytes_of_holes_are_not_read() {
    let folder = tempfile::tempdir().unwrap();
    let mut file = File::create(folder.path().join("sparse")).unwrap();
    let size = 20_u64 << 30;
    file.set_len(size).unwrap();
    file.seek(SeekFrom::Start(7 << 30)).unwrap();
    file.write_all(b"data").unwrap();
    let manifest = Manifest::scan(folder.path()).unwrap();
    let mut digest = crate::content::ContentDigest::new(size);
    digest.zeroes(7 << 30);
    digest.bytes(b"data");
    digest.zeroes(size - (7 << 30) - 4);
    assert_eq!(manifest.entries[&b"sparse"[..]].content, Some(digest.finish().unwrap()));
}
