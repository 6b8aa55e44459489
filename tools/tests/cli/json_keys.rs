//! Every key that `--json` prints is in `docs/formats/json.md`, in the section of its command; and no field is there that no
//! program prints.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use sealblock_btrfs_format::checksum::ChecksumType;
use sealblock_btrfs_format::key::objectid;
use sealblock_proofs_btrfs_images::handmade::{Handmade, Storage};
use serde_json::Value;

use crate::common::server::Server;
use crate::common::{Place, noise};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// The sections of the document: what stands below each heading of the second level.
fn sections() -> BTreeMap<String, String> {
    let document = fs::read_to_string(root().join("docs/formats/json.md")).unwrap();
    let sections = document.split("\n## ").skip(1);
    sections
        .map(|section| section.split_once('\n').unwrap())
        .map(|(name, text)| (name.to_owned(), text.to_owned()))
        .collect()
}

fn is_key(word: &str) -> bool {
    !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
}

/// The words between backquotes, and the keys of examples.
fn documented(section: &str) -> BTreeSet<String> {
    let quoted = section.split('`').skip(1).step_by(2);
    let examples = section.split('"').skip(1).step_by(2);
    quoted.chain(examples).filter(|word| is_key(word)).map(str::to_owned).collect()
}

/// What the keys of printed objects are compared with.
struct Keys {
    sections: BTreeMap<String, String>,
    missing: BTreeSet<String>,
}

impl Keys {
    /// All keys of an object, at any depth, stand in one of these sections.
    fn check(&mut self, value: &Value, headings: &[&str]) {
        let text: Vec<_> =
            headings.iter().map(|heading| self.sections.get(*heading).unwrap_or_else(|| panic!("{heading}"))).collect();
        let known: BTreeSet<String> = text.into_iter().flat_map(|section| documented(section)).collect();
        self.walk(value, &known, headings[0]);
    }

    fn walk(&mut self, value: &Value, known: &BTreeSet<String>, heading: &str) {
        match value {
            Value::Object(object) => {
                for (key, value) in object {
                    if !known.contains(key) {
                        self.missing.insert(format!("{heading}: {key}"));
                    }
                    self.walk(value, known, heading);
                }
            }
            Value::Array(values) => values.iter().for_each(|value| self.walk(value, known, heading)),
            _ => {}
        }
    }

    /// The object of `info`, or one of the devices in it: each part has a section of its own.
    fn check_info(&mut self, mut info: Value) {
        const PARTS: [(&str, &[&str]); 6] = [
            ("volume", &["`info --json` of a volume"]),
            ("file", &["`info --json` of a file"]),
            ("remote", &["`info --json` over a network"]),
            ("export", &["`info --json` over a network"]),
            ("paths", &["`info --json` over a network"]),
            ("mirror", &["`mirror status --json`", "`status --json`"]),
        ];
        let object = info.as_object_mut().unwrap();
        for (part, headings) in PARTS {
            self.check(&object.insert(part.to_owned(), Value::Null).unwrap(), headings);
        }
        self.check(&object.insert("damage".to_owned(), Value::Null).unwrap_or_default(), &["`status --json`"]);
        let (inner, members) = (object["inner"].take(), object["members"].take());
        [inner].into_iter().filter(Value::is_object).for_each(|inner| self.check_info(inner));
        members.as_array().into_iter().flatten().for_each(|member| self.check_info(member.clone()));
        self.check(&info, &["`info --json`"]);
    }
}

/// Runs a command, whatever it finds, and gives what it printed.
#[track_caller]
fn printed(place: &Place, command: &str) -> Value {
    let answer = place.run(&format!("{command} --json"));
    assert!([0, 1, 4].contains(&answer.status), "{command}: {}", answer.stderr);
    serde_json::from_slice(&answer.stdout).unwrap_or_else(|error| panic!("{command}: {error}: {}", answer.text()))
}

/// Commands on volumes and groups that nobody serves.
fn offline(place: &Place, keys: &mut Keys) {
    let create = ["`create --json`", "`info --json`"];
    for name in ["v", "a", "b", "c", "d"] {
        keys.check(&printed(place, &format!("create {name} --size 4MiB")), &create);
    }
    place.run("mirror create a b").succeeds();
    place.write("data", &noise(1, 1 << 20));
    for (command, headings) in [
        ("copy data v", &["`copy --json`"][..]),
        ("copy data mirror:a,b", &["`copy --json`"]),
        ("copy data stripe:c,d", &["`copy --json`"]),
        ("zero v --range 3", &["`zero --json`, `discard --json`"]),
        ("discard v --range 4", &["`zero --json`, `discard --json`"]),
        ("resize v --size 5MiB", &["`resize --json`"]),
        ("scrub status v", &["`scrub status --json`, `scrub start --json`", "`status --json`"]),
        ("mirror status mirror:a,b", &["`mirror status --json`", "`status --json`"]),
    ] {
        keys.check(&printed(place, command), headings);
    }
    place.run("corrupt v --lba 7 --kind data").succeeds();
    for (command, heading) in [
        ("verify v", "`verify --json`"),
        ("verify v --resume record", "`verify --json`"),
        ("verify mirror:a,nothere", "`verify --json`"),
        ("verify nothere", "`verify --json`"),
        ("compare v c", "`compare --json`"),
        ("copy v out --salvage", "`copy --json`"),
        ("rescue v rescued", "`rescue --json`"),
    ] {
        let answer = place.run(&format!("{command} --json"));
        let text = answer.text();
        text.lines().for_each(|line| keys.check(&serde_json::from_str(line).unwrap(), &[heading]));
    }
    for target in ["v", "mirror:a,b", "stripe:c,d", "raw:data", "mem:1MiB", "offset:0..7,v"] {
        keys.check_info(printed(place, &format!("info {target}")));
    }
}

/// A server, its log, and what commands say of it.
fn served(place: &Place, keys: &mut Keys) {
    const SERVE: &[&str] =
        &["`serve --json`", "`scrub status --json`, `scrub start --json`", "`attach --json`", "`resize --json`"];
    let server = Server::start(place, "v mirror:a,b nothere --nbd 127.0.0.1:0");
    let nbd = server.ready["nbd"]["listeners"][0].as_str().unwrap().to_owned();
    keys.check(&server.ready, SERVE);
    let target = server.target("v");
    for target in [target.clone(), format!("nbd://{nbd}/v"), format!("multipath:[{target}],[{target}]")] {
        keys.check_info(printed(place, &format!("info {target}")));
        // The server says in its log what this finds.
        keys.check(&printed(place, &format!("verify {target}")), &["`verify --json`"]);
    }
    keys.check(&printed(place, &format!("discover {}", server.address())), &["`discover --json`"]);
    keys.check(&printed(place, &format!("discover nbd://{nbd}")), &["`discover --json`"]);
    let scrub = ["`scrub status --json`, `scrub start --json`", "`status --json`"];
    keys.check(&printed(place, "scrub start v --wait"), &scrub);
    keys.check(&printed(place, "resize v --size 6MiB"), &["`resize --json`"]);
    keys.check(&printed(place, "log warn"), &["`log --json`"]);
    keys.check(&printed(place, "status"), &["`status --json`", scrub[0], "`mirror status --json`", "`serve --json`"]);
    let ended = server.stop();
    ended.events.iter().chain(&ended.told()).for_each(|event| keys.check(event, SERVE));
}

fn filesystem(place: &Place, keys: &mut Keys) {
    let mut made = Handmade::new(4096, ChecksumType::Crc32c);
    made.file(objectid::FIRST_FREE, b"file", &[7; 9000], Storage::Inline);
    made.build().write(&place.path("image")).unwrap();
    place.write("new", b"");
    place.set_len("new", 100 << 20);
    keys.check(&printed(place, "fs format new"), &["`fs format --json`", "`fs info --json`"]);
    place.write("local", b"data");
    let change = "`fs` commands that change";
    for command in [
        "put local new",
        "mkdir new/a",
        "rmdir new/a",
        "mv new/local new/b",
        "ln -s x new/c",
        "chmod 600 new/b",
        "chown 1:2 new/b",
        "fallocate --length 1MiB new/f",
        "subvolume create new/d",
        "snapshot new/d new/e",
        "subvolume delete new/d",
        "rm -r --subvolumes new/e",
    ] {
        keys.check(&printed(place, &format!("fs {command}")), &[change]);
    }
    let list = ["`fs subvolume list --json`", "`fs info --json`"];
    keys.check(&printed(place, "fs subvolume list new"), &list);
    let get = "`fs get --json`, `fs rescue --json`";
    for (command, heading) in [
        ("fs info image", "`fs info --json`"),
        ("fs ls image --long", "`fs ls --json`"),
        ("fs verify image", "`fs verify --json`"),
        ("fs check image", "`fs check --json`"),
        ("fs get image/file got", get),
        ("fs rescue image saved", get),
    ] {
        keys.check(&printed(place, command), &[heading]);
    }
    let bench = ["`fs bench --json`", "`bench --json`"];
    keys.check(&printed(place, "fs bench --size 1MiB --rounds 1 --modes csum,device,csum-pi"), &bench);
}

#[test]
fn every_key_that_is_printed_is_documented_in_the_section_of_its_command() {
    let place = Place::in_memory();
    let mut keys = Keys { sections: sections(), missing: BTreeSet::new() };
    offline(&place, &mut keys);
    served(&place, &mut keys);
    filesystem(&place, &mut keys);
    assert!(keys.missing.is_empty(), "docs/formats/json.md lacks:\n{:#?}", keys.missing);
}

/// A word as serde writes the name of a variant, which is how events are named.
fn snake_case(word: &str) -> String {
    let mut name = String::new();
    for (at, char) in word.char_indices() {
        if at > 0 && char.is_ascii_uppercase() {
            name.push('_');
        }
        name.push(char.to_ascii_lowercase());
    }
    name
}

/// All words of the sources of programs that print.
fn words_of_sources() -> BTreeSet<String> {
    let mut words = BTreeSet::new();
    let mut open: Vec<PathBuf> = ["tools/src", "server/src", "stack/src", "perf/src", "filesystem"]
        .iter()
        .map(|name| root().join(name))
        .collect();
    while let Some(path) = open.pop() {
        if path.is_dir() {
            open.extend(fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(path).unwrap();
            let found = text.split(|char: char| !(char.is_ascii_alphanumeric() || char == '_'));
            words.extend(found.map(snake_case));
        }
    }
    words
}

#[test]
fn every_field_that_is_documented_is_a_word_of_a_program_that_prints() {
    let words = words_of_sources();
    let mut unknown = Vec::new();
    for (heading, text) in sections() {
        // A row of a table begins with the fields that it is about.
        let cells = text.lines().filter_map(|line| line.strip_prefix("| `")?.split(" |").next());
        for cell in cells.flat_map(|cell| cell.split('`').step_by(2)).filter(|word| is_key(word)) {
            if !words.contains(cell) {
                unknown.push(format!("{heading}: {cell}"));
            }
        }
    }
    assert!(unknown.is_empty(), "docs/formats/json.md has fields that nothing prints: {unknown:#?}");
}
