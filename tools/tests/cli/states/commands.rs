//! The commands, and what is asked of each state.

use std::fs;
use std::path::PathBuf;

use super::scenes::Scene;
use super::words::Words;
use crate::common::server::Server;
use crate::common::{Answer, Place, until};

/// Commands that change nothing, of a volume or a mirror `T`.
const READING: [&str; 8] = [
    "info T",
    "verify T",
    "copy T out",
    "copy T out --salvage",
    "compare T data",
    "compare data T",
    "compare --zero T",
    "scrub status T",
];
/// Those of volumes only.
const OF_VOLUMES: [&str; 1] = ["rescue T out"];
/// Those of mirrors only, with those that change one.
const OF_MIRRORS: [&str; 7] = [
    "mirror status T",
    "mirror create a b",
    "mirror remove T b",
    "mirror remove T a",
    "mirror replace T b spare",
    "mirror replace T a spare",
    "mirror accept-stale T b",
];
/// Those of filesystems.
const OF_FILESYSTEMS: [&str; 6] =
    ["fs info F", "fs ls F", "fs cat F/file", "fs get F/file got", "fs verify F", "fs rescue F rescued"];
/// Those of filesystems that can be written, one after the other.
const OF_WRITABLE: [&str; 11] = [
    "fs check W",
    "fs put piece W/new",
    "fs mkdir W/directory",
    "fs mv W/new W/directory",
    "fs fallocate --length 64KiB W/allocated",
    "fs fallocate -w --length 64KiB W/zeroed",
    "fs snapshot W W/snapshot",
    "fs rm W/file",
    "fs rmdir W/snapshot",
    "fs subvolume delete W/snapshot",
    "fs check W",
];
/// Commands that change something, each on the state as it was made.
const CHANGING: [&str; 6] = [
    "verify T --repair",
    "copy piece T",
    "zero T --range 9..9",
    "discard T --range 9..9 --yes",
    "resize T --size 512KiB",
    "mirror add T spare",
];
/// Ways of serving: the first that works is the one in which hosts are looked at.
const SERVING: [&str; 4] =
    ["serve T", "serve T --accept-older", "serve T --read-only", "serve T --read-only --accept-older"];
/// Commands while it is served, one after the other; `S` is the namespace as hosts see it.
const SERVED: [&str; 10] = [
    "status T",
    "info S",
    "copy S out",
    "verify S",
    "compare S data",
    "scrub start T --wait",
    "scrub status T",
    "status T",
    "mirror status T",
    "copy piece offset:40..,S",
];
/// Commands after the server was killed.
const KILLED: [&str; 3] = ["info T", "scrub status T", "mirror status T"];

/// One line of the table.
pub struct Row {
    /// When it was asked.
    pub part: &'static str,
    /// The command, with `T` for the target.
    pub command: String,
    /// The exit status, or how a server went.
    pub status: String,
    /// What it said.
    pub words: String,
}

/// The small files of a place, to be put back before each change. Larger ones have filesystems, and are only read.
struct Saved(Vec<(PathBuf, Vec<u8>)>);

impl Saved {
    fn of(place: &Place) -> Saved {
        let read = |path: PathBuf| (path.clone(), fs::read(&path).unwrap());
        Saved(small_files(place).into_iter().map(read).collect())
    }

    fn put_back(&self, place: &Place) {
        small_files(place).iter().for_each(|path| fs::remove_file(path).unwrap());
        self.0.iter().for_each(|(path, bytes)| fs::write(path, bytes).unwrap());
    }
}

fn small_files(place: &Place) -> Vec<PathBuf> {
    const MOST_BYTES: u64 = 8 << 20;
    let entries = fs::read_dir(place.path("")).unwrap().map(|entry| entry.unwrap());
    let is_small = |entry: &fs::DirEntry| entry.metadata().is_ok_and(|of| of.is_file() && of.len() < MOST_BYTES);
    entries.filter(is_small).map(|entry| entry.path()).collect()
}

/// A state while it is asked.
struct Asked<'a> {
    scene: &'a Scene,
    place: Place,
    target: String,
    saved: Saved,
    rows: Vec<Row>,
}

/// Asks everything of a state.
pub fn ask(scene: &Scene) -> Vec<Row> {
    let (place, target, filesystem) = scene.build();
    let saved = Saved::of(&place);
    let mut asked = Asked { scene, place, target, saved, rows: Vec::new() };
    let own: &[&str] = if scene.is_mirror { &OF_MIRRORS } else { &OF_VOLUMES };
    let making: &[&str] = if scene.is_mirror { &[] } else { &["mirror create T spare"] };
    for (part, commands) in [("", &READING[..]), ("", own), ("", &CHANGING[..]), ("", making)] {
        for command in commands {
            asked.saved.put_back(&asked.place);
            asked.run(part, command, &[]);
        }
    }
    if let Some([read, written]) = filesystem {
        asked.saved.put_back(&asked.place);
        OF_FILESYSTEMS.iter().for_each(|command| asked.run("", command, &[("F", &read)]));
        OF_WRITABLE.iter().for_each(|command| asked.run("", command, &[("W", &written)]));
    }
    asked.serve();
    asked.rows
}

impl Asked<'_> {
    fn note(&mut self, part: &'static str, command: &str, answer: &Answer, given: &[(&str, &str)]) {
        let words = Words::new(&self.place, given).of(&answer.stdout, &answer.stderr);
        self.rows.push(Row { part, command: command.to_owned(), status: answer.status.to_string(), words });
    }

    fn run(&mut self, part: &'static str, command: &str, given: &[(&str, &str)]) {
        let filled =
            given.iter().fold(fill(command, "T", &self.target), |line, (name, value)| fill(&line, name, value));
        let answer = self.place.run(&filled);
        self.note(part, command, &answer, given);
    }

    /// Each way of serving, and what hosts and operators are told by the first that works.
    fn serve(&mut self) {
        let mut works = None;
        for command in SERVING {
            // What is served without a word needs no consent.
            if command.contains("--accept-older") && works.is_some() {
                continue;
            }
            self.saved.put_back(&self.place);
            let arguments = fill(command, "T", &self.target).replacen("serve ", "", 1);
            match self.start(&arguments) {
                Ok(server) => {
                    self.note_started("", command);
                    if works.is_none() {
                        self.ask_served(server, &arguments);
                        works = Some(());
                    } else {
                        server.kill();
                    }
                }
                Err(answer) => self.note("", command, &answer, &[]),
            }
        }
    }

    /// Starts a server whose messages go to a file, and waits until no resync is under way.
    fn start(&self, arguments: &str) -> Result<Server, Answer> {
        let server = Server::try_start(&self.place, &format!("--cores 1 {arguments}"), "messages")?;
        if self.scene.is_mirror {
            let status = format!("mirror status {} --json", self.target);
            // A server that takes no writes leaves copies that a crash left different as they are.
            let is_quiet = |status: &serde_json::Value| {
                let replicas = status["replicas"].as_array().unwrap();
                let is_reconciled = status["nosync_bytes"] == 0 || arguments.contains("--read-only");
                is_reconciled && replicas.iter().all(|replica| replica["state"] != "resyncing")
            };
            until(|| is_quiet(&self.place.run(&status).json()));
        }
        Ok(server)
    }

    /// What a server that runs has logged.
    fn note_started(&mut self, part: &'static str, command: &str) {
        // A thread of its own writes the log, also after the server is ready. The server knows of each warning in it.
        let status = self.place.run(&format!("status {} --json", self.target)).json();
        let known = status["servers"][0]["errors"].as_array().unwrap().len();
        until(|| self.place.read("messages").split(|byte| *byte == b'\n').count() > known);
        let log = String::from_utf8(self.place.read("messages")).unwrap();
        let parse = |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap();
        let messages: Vec<_> = log.lines().map(|line| parse(line)["message"].as_str().unwrap().to_owned()).collect();
        let words = Words::new(&self.place, &[]).of(&[], &messages.join("\n"));
        self.rows.push(Row { part, command: command.to_owned(), status: "runs".to_owned(), words });
    }

    /// Asks of a served target, and of what is left of it when its server is killed.
    fn ask_served(&mut self, server: Server, arguments: &str) {
        let applies = |command: &&&str| self.scene.is_mirror || !command.starts_with("mirror");
        let served: Vec<&&str> = SERVED.iter().filter(applies).collect();
        let killed: Vec<&&str> = KILLED.iter().filter(applies).collect();
        let namespace = server.target(self.target.split(':').next().unwrap());
        served.iter().for_each(|command| self.run("served: ", command, &[("S", &namespace)]));
        server.kill();
        killed.iter().for_each(|command| self.run("server killed: ", command, &[]));
        let server = self.start(arguments).unwrap();
        self.run("served again: ", "status T", &[]);
        server.kill();
    }
}

/// A command with the value of a name, also where more follows the name.
fn fill(command: &str, name: &str, value: &str) -> String {
    let of = |word: &str| match word.rsplit(',').next().unwrap() {
        last if last == name || last.starts_with(&format!("{name}/")) => {
            let at = word.len() - last.len();
            format!("{}{value}{}", &word[..at], &last[name.len()..])
        }
        _ => word.to_owned(),
    };
    command.split(' ').map(of).collect::<Vec<_>>().join(" ")
}
