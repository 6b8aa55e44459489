//! What the tests of the binary share: a folder that goes away, the binary itself, and what it answered.
//!
//! Tests see what a user sees and nothing else: arguments, exit status, standard output, standard error, and files. Every
//! answer is looked through for a panic, whatever the test is about.

pub mod devices;
pub mod host;
pub mod server;
pub mod serving;

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

/// Where the two superblocks of a volume lie, in bytes.
pub const SUPERBLOCK_OFFSETS: [u64; 2] = [0, 32 << 10];
/// Bytes of one superblock.
pub const SUPERBLOCK_BYTES: u64 = 512;

/// Where control sockets of a place's servers are, apart from those of other servers.
pub const RUNTIME_FOLDER: &str = "runtime-folder";

/// A folder to work in. Names of files in it are used as targets, since every command is run there.
pub struct Place {
    folder: TempDir,
    runtime: &'static str,
}

/// What a command answered.
#[derive(Debug)]
pub struct Answer {
    pub status: i32,
    pub stdout: Vec<u8>,
    pub stderr: String,
    command: String,
}

/// Waits until it is so.
#[track_caller]
pub fn until(mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(60), "it does not come true");
        thread::sleep(Duration::from_millis(50));
    }
}

impl Place {
    pub fn new() -> Place {
        Place::with_runtime("auto")
    }

    /// A place where the binary runs on this runtime. `syscalls` starts sooner, since it sets up no ring.
    pub fn with_runtime(runtime: &'static str) -> Place {
        let folder = tempfile::tempdir().expect("a temporary folder");
        fs::create_dir(folder.path().join(RUNTIME_FOLDER)).unwrap();
        Place { folder, runtime }
    }

    /// A place in memory where the machine has a file system there: what counts syncs of hundreds of commands is soon done.
    pub fn in_memory() -> Place {
        let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a temporary folder");
        fs::create_dir(folder.path().join(RUNTIME_FOLDER)).unwrap();
        Place { folder, runtime: "syscalls" }
    }

    pub fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The binary with arguments separated by spaces, not yet started.
    ///
    /// `env` resets SIGINT to its default: the binary keeps an inherited SIG_IGN, and a shell's background jobs have it.
    pub fn command(&self, arguments: &str) -> Command {
        let mut command = Command::new("env");
        command.args(["--default-signal=INT", env!("CARGO_BIN_EXE_sealblock")]);
        command.args(arguments.split_whitespace()).current_dir(self.folder.path());
        command.env("XDG_RUNTIME_DIR", self.path(RUNTIME_FOLDER));
        command.env("SEALBLOCK_RUNTIME", self.runtime).stdin(Stdio::null());
        command
    }

    /// Runs the binary with arguments separated by spaces.
    #[track_caller]
    pub fn run(&self, arguments: &str) -> Answer {
        answer(&mut self.command(arguments))
    }

    /// Runs the binary with these bytes on standard input.
    #[track_caller]
    pub fn run_with_input(&self, arguments: &str, input: &[u8]) -> Answer {
        let name = self.path("standard-input");
        fs::write(&name, input).unwrap();
        answer(self.command(arguments).stdin(File::open(name).unwrap()))
    }

    /// Starts the binary with pipes on all sides.
    pub fn start(&self, arguments: &str) -> Child {
        self.command(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    pub fn write(&self, name: &str, bytes: &[u8]) {
        fs::write(self.path(name), bytes).unwrap();
    }

    pub fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap()
    }

    /// Overwrites bytes inside a file behind the back of every process.
    pub fn poke(&self, name: &str, offset: u64, bytes: &[u8]) {
        let mut file = File::options().write(true).open(self.path(name)).unwrap();
        file.seek(SeekFrom::Start(offset)).unwrap();
        file.write_all(bytes).unwrap();
    }

    pub fn set_len(&self, name: &str, length: u64) {
        File::options().write(true).open(self.path(name)).unwrap().set_len(length).unwrap();
    }

    pub fn len(&self, name: &str) -> u64 {
        fs::metadata(self.path(name)).unwrap().len()
    }

    /// Bytes that a file takes of its file system.
    pub fn allocated_bytes(&self, name: &str) -> u64 {
        fs::metadata(self.path(name)).unwrap().blocks() * 512
    }

    /// Waits until a file takes so much of its file system, for as long as the command that fills it runs.
    #[track_caller]
    pub fn wait_for_bytes(&self, name: &str, bytes: u64, filler: &mut Child) {
        let start = Instant::now();
        while self.allocated_bytes(name) < bytes && filler.try_wait().unwrap().is_none() {
            assert!(start.elapsed() < Duration::from_secs(300), "{name} does not grow");
            thread::sleep(Duration::from_millis(1));
        }
        let allocated = self.allocated_bytes(name);
        assert!(allocated >= bytes, "{name} takes {allocated} bytes, and the command has ended");
    }

    /// A volume `v` with these options, and `data` at its start.
    #[track_caller]
    pub fn volume(&self, options: &str, data: &[u8]) {
        self.run(&format!("create v {options}")).succeeds();
        self.write("data", data);
        self.run("copy data v").succeeds();
    }

    /// Blocks `first..=last` of a target, read through the binary.
    #[track_caller]
    pub fn blocks(&self, target: &str, first: u64, last: u64) -> Vec<u8> {
        let answer = self.run(&format!("copy offset:{first}..{last},{target} -"));
        answer.succeeds();
        answer.stdout
    }
}

/// Runs a command and collects its answer.
#[track_caller]
pub fn answer(command: &mut Command) -> Answer {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    Answer::of(output, format!("{command:?}"))
}

/// Collects the answer of a command that was started.
#[track_caller]
pub fn answer_of(child: Child) -> Answer {
    Answer::of(child.wait_with_output().unwrap(), "a started command".to_owned())
}

impl Answer {
    #[track_caller]
    fn of(output: Output, command: String) -> Answer {
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!stderr.contains("panicked"), "{command} panicked:\n{stderr}");
        // A command that a signal ended has no status; no test asks for one below zero.
        Answer { status: output.status.code().unwrap_or(-1), stdout: output.stdout, stderr, command }
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.stdout.clone()).expect("standard output is text")
    }

    #[track_caller]
    pub fn json(&self) -> Value {
        let text = self.text();
        assert_eq!(text.lines().count(), 1, "one object on one line: {text}");
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}: {text}", self.command))
    }

    #[track_caller]
    pub fn ends_with(&self, status: i32) -> &Answer {
        assert_eq!(self.status, status, "{}\n{}{}", self.command, String::from_utf8_lossy(&self.stdout), self.stderr);
        self
    }

    #[track_caller]
    pub fn succeeds(&self) -> &Answer {
        self.ends_with(0)
    }

    /// Failed with this status, and standard error has all these words.
    #[track_caller]
    pub fn fails(&self, status: i32, words: &[&str]) -> &Answer {
        self.ends_with(status);
        let is_failure = |line: &str| line.starts_with("sealblock: ") || line.starts_with("error: ");
        assert!(self.stderr.lines().any(is_failure), "{}", self.stderr);
        for word in words {
            assert!(self.stderr.contains(word), "{}: '{word}' is missing in:\n{}", self.command, self.stderr);
        }
        self
    }

    #[track_caller]
    pub fn says(&self, words: &[&str]) -> &Answer {
        let text = self.text();
        for word in words {
            assert!(text.contains(word), "{}: '{word}' is missing in:\n{text}", self.command);
        }
        self
    }
}

/// A place with the volume `v` of 4096 blocks, of which these are damaged.
pub fn damaged(lbas: &[u64]) -> Place {
    let place = Place::new();
    place.volume("--size 16MiB", &noise(1, 16 << 20));
    for lba in lbas {
        place.run(&format!("corrupt v --lba {lba} --kind data")).succeeds();
    }
    place
}

/// Bytes that repeat nowhere: different for every seed, and never zero for a whole block.
pub fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        // xorshift64*, which is plenty for data that only has to differ.
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        bytes.extend_from_slice(&state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// Whether the tests run as root.
pub fn is_root() -> bool {
    // A process' own entry belongs to its effective user.
    fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0)
}

/// Whether a program is there.
pub fn has(program: impl AsRef<OsStr>) -> bool {
    Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
}

/// Says that a test was not carried out, and why, also without `--nocapture`.
pub fn skipped(why: &str) {
    println!("skipped: {why}");
    // Passed tests keep their output to themselves; this way it is seen without `--nocapture`.
    let _ = writeln!(std::io::stderr(), "skipped: {why}");
}

/// Bytes of a block.
pub const BLOCK: usize = 4096;

/// Two volumes of this many blocks that a mirror has filled.
pub fn filled(place: &Place, blocks: usize) -> Vec<u8> {
    let data = noise(11, blocks * BLOCK);
    for name in ["a", "b"] {
        place.run(&format!("create {name} --size {}", blocks * BLOCK)).succeeds();
    }
    // Twice, so that each block has an older content that can come back.
    place.write("data", &noise(10, blocks * BLOCK));
    place.run("copy data mirror:a,b").succeeds();
    place.write("data", &data);
    place.run("copy data mirror:a,b").succeeds();
    data
}

/// What `verify` reports, with this exit status.
#[track_caller]
pub fn verify(place: &Place, target: &str, status: i32) -> Value {
    place.run(&format!("verify {target} --json")).ends_with(status).json()
}
