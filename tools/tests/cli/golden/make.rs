//! Makes a set of golden images. A set is made once, by the program of its time, and never again: what a later program has to
//! open is what that one wrote.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use sealblock_integrity::guard::crc32c;

use super::pack::{self, Row};
use super::{CHANGED_BLOCK, look};
use crate::common::server::{Nbd, Server};
use crate::common::{Answer, Place, answer};

/// A folder, and the program that makes images in it.
pub struct Maker {
    place: Place,
    program: PathBuf,
}

/// A case: its name, its target, its files, and what makes them.
type Recipe = (String, &'static str, &'static [&'static str], Box<dyn Fn(&Maker)>);

impl Maker {
    fn command(&self, arguments: &str) -> Command {
        let mut command = self.place.command(arguments);
        // `env` stands before the program, which may be another one than is tested.
        let mut words: Vec<_> = command.get_args().map(ToOwned::to_owned).collect();
        words[1] = self.program.clone().into();
        let mut other = Command::new(command.get_program());
        other.args(words).current_dir(self.place.path(""));
        other.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command = other;
        command
    }

    #[track_caller]
    fn run(&self, arguments: &str) -> Answer {
        answer(&mut self.command(arguments))
    }

    fn serve(&self, target: &str) -> Server {
        Server::spawn(self.command(&format!("serve --json --listen 127.0.0.1:0 --nbd 127.0.0.1:0 {target}")))
    }

    /// A file of this name that packs well, and of which no two pieces are the same.
    fn data(&self, name: &str, bytes: usize) {
        let piece = |at: usize| format!("{:-<511}\n", format!("{name}, piece {at}"));
        let text: String = (0..bytes / 512).map(piece).collect();
        self.place.write(name, text.as_bytes());
    }

    /// Writes a few blocks, some of them again, some far behind, and leaves a hole. Guards do not pack, so it is little.
    fn fill(&self, target: &str) {
        self.data("first", 16 << 10);
        self.run(&format!("copy first {target}")).succeeds();
        self.data("second", 8 << 10);
        self.run(&format!("copy second offset:2..,{target}")).succeeds();
        self.run(&format!("copy second offset:200..,{target}")).succeeds();
        self.run(&format!("discard {target} --range 1")).succeeds();
    }

    /// The same through a server that is killed: the log is not empty, and all that was answered is flushed.
    fn fill_and_kill(&self, target: &str, served_as: &str) {
        let server = self.serve(target);
        self.fill(&server.target(served_as));
        server.kill();
    }
}

fn recipes() -> Vec<Recipe> {
    let mut recipes = volumes();
    recipes.extend(states());
    recipes.extend(groups());
    recipes
}

/// Volumes of every guard and block size, closed and not.
fn volumes() -> Vec<Recipe> {
    let mut recipes: Vec<Recipe> = Vec::new();
    for (at, guard) in ["crc16", "crc32c", "crc64", "none"].into_iter().enumerate() {
        for (of, block) in [512, 4096].into_iter().enumerate() {
            // Each type with one guard at least.
            let kind = if guard == "none" { String::new() } else { format!("--type {}", (at + of) % 3 + 1) };
            let create = move |maker: &Maker| {
                maker.run(&format!("create v --size 1MiB --block-size {block} --guard {guard} {kind}")).succeeds();
            };
            let closed = create.clone();
            recipes.push((
                format!("closed-{guard}-{block}"),
                "v",
                &["v"],
                Box::new(move |maker| {
                    closed(maker);
                    maker.fill("v");
                }),
            ));
            recipes.push((
                format!("killed-{guard}-{block}"),
                "v",
                &["v"],
                Box::new(move |maker| {
                    create(maker);
                    maker.fill_and_kill("v", "v");
                }),
            ));
        }
    }
    recipes
}

/// Other states of a volume.
fn states() -> Vec<Recipe> {
    let recipe = |name: &str, make: fn(&Maker)| -> Recipe { (name.to_owned(), "v", &["v"], Box::new(make)) };
    vec![
        recipe("blank", |maker| {
            maker.run("create v --size 1MiB").succeeds();
        }),
        recipe("resized", |maker| {
            maker.run("create v --size 1MiB").succeeds();
            maker.fill("v");
            maker.run("resize v --size 3MiB").succeeds();
            maker.run("copy first offset:600..,v").succeeds();
        }),
        recipe("unreadable-blocks", |maker| {
            maker.run("create damaged --size 1MiB").succeeds();
            maker.fill("damaged");
            maker.run("corrupt damaged --lba 0 --kind data").succeeds();
            maker.run("create v --size 1MiB").succeeds();
            maker.run("copy damaged v --salvage").ends_with(1);
        }),
        recipe("scrubbed", |maker| {
            maker.run("create v --size 1MiB").succeeds();
            maker.fill("v");
            maker.run("corrupt v --lba 0 --kind guard").succeeds();
            let server = maker.serve("v");
            maker.run("scrub start v --wait").ends_with(1);
            server.stop().is_clean();
        }),
        recipe("not-flushed", |maker| {
            maker.run("create v --size 1MiB").succeeds();
            maker.fill("v");
            let server = maker.serve("v");
            let mut client = Nbd::open(server.ready["nbd"]["listeners"][0].as_str().unwrap(), "v").unwrap();
            assert_eq!(client.write(64 << 10, &[0x77; 8192]), 0);
            server.kill();
            set_other_boot(&maker.place);
        }),
    ]
}

fn groups() -> Vec<Recipe> {
    let recipe = |name: &str, target: &'static str, files: &'static [&'static str], make: fn(&Maker)| -> Recipe {
        (name.to_owned(), target, files, Box::new(make))
    };
    vec![
        recipe("mirror", "mirror:a,b", &["a", "b"], |maker| mirror(maker, &["a", "b"], "1MiB")),
        recipe("mirror-named-of-three", "mirror:a,b,c", &["a", "b", "c"], |maker| {
            for name in ["a", "b", "c"] {
                maker.run(&format!("create {name} --size 1MiB --guard crc64")).succeeds();
            }
            maker.run("mirror create a b c --name photos").succeeds();
            maker.fill("mirror:a,b,c");
        }),
        recipe("mirror-degraded", "mirror:a,b", &["a", "b"], |maker| {
            mirror(maker, &["a", "b"], "1MiB");
            fs::rename(maker.place.path("b"), maker.place.path("away")).unwrap();
            maker.data("later", 8 << 10);
            // The first programs did not say by their exit status that `b` is away.
            assert!([0, 4].contains(&maker.run("copy later offset:64..,mirror:a,b").status));
            fs::rename(maker.place.path("away"), maker.place.path("b")).unwrap();
        }),
        recipe("mirror-killed", "mirror:a,b", &["a", "b"], |maker| {
            mirror(maker, &["a", "b"], "1MiB");
            let server = maker.serve("mirror:a,b");
            let name = server.ready["subsystems"][0]["nqn"].as_str().unwrap().split_once(':').unwrap().1.to_owned();
            maker.data("later", 8 << 10);
            maker.run(&format!("copy later offset:64..,{}", server.target(&name))).succeeds();
            server.kill();
        }),
        recipe("mirror-with-bitmap-pages", "mirror:a,b", &["a", "b"], |maker| {
            mirror(maker, &["a", "b"], "513MiB");
            maker.run("copy second offset:131000..,mirror:a,b").succeeds();
        }),
        recipe("stripe", "stripe-16KiB:a,b", &["a", "b"], |maker| {
            maker.run("create a --size 512KiB").succeeds();
            maker.run("create b --size 512KiB").succeeds();
            maker.fill("stripe-16KiB:a,b");
        }),
        recipe("mirror-of-a-stripe", "mirror:[stripe-16KiB:a,b],c", &["a", "b", "c"], |maker| {
            maker.run("create a --size 512KiB").succeeds();
            maker.run("create b --size 512KiB").succeeds();
            maker.run("create c --size 1MiB").succeeds();
            maker.run("mirror create stripe-16KiB:a,b c").succeeds();
            maker.fill("mirror:[stripe-16KiB:a,b],c");
        }),
    ]
}

fn mirror(maker: &Maker, names: &[&str], size: &str) {
    for name in names {
        maker.run(&format!("create {name} --size {size}")).succeeds();
    }
    maker.run(&format!("mirror create {}", names.join(" "))).succeeds();
    maker.fill(&format!("mirror:{}", names.join(",")));
}

/// Gives the volume `v` the notes of another start of a machine, so that it is the same on every machine.
fn set_other_boot(place: &Place) {
    super::patch_superblocks(place, "v", |superblock| superblock[296..312].fill(0x5A));
}

/// Makes the set of this name, with the program that is tested or the one that `SEALBLOCK_GOLDEN_PROGRAM` names.
pub fn make(set: &str) {
    let folder = pack::sets().join(set);
    fs::create_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}: sets are made once", folder.display()));
    let other = std::env::var_os("SEALBLOCK_GOLDEN_PROGRAM").map(PathBuf::from);
    let program = other.unwrap_or_else(|| env!("CARGO_BIN_EXE_sealblock").into());
    let mut rows = Vec::new();
    for (name, target, files, make) in recipes() {
        let maker = Maker { place: Place::new(), program: program.clone() };
        let is_made = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| make(&maker))).is_ok();
        if !is_made {
            eprintln!("{name} was not made: that program cannot do it, or it failed as shown above");
            continue;
        }
        // A killed server's descriptors are closed a moment later.
        std::thread::sleep(Duration::from_millis(100));
        let packed = pack::pack(&maker.place.path(""), files);
        fs::write(folder.join(format!("{name}.gz")), &packed).unwrap();
        let found = look(&packed, target);
        rows.push(Row { name, target: target.to_owned(), ..found });
    }
    pack::write_table(&folder, &rows);
    println!("{} cases in {}; block {CHANGED_BLOCK} is what the test changes", rows.len(), folder.display());
}

/// The superblock's own checksum, for a test that changes a field.
pub fn seal_superblock(superblock: &mut [u8]) {
    let checksum = crc32c(&superblock[..508]);
    superblock[508..].copy_from_slice(&checksum.to_le_bytes());
}
