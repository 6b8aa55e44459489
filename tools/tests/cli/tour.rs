//! What the documents have people type works as written: every line of it, with the exit status that stands behind it.
//!
//! The commands are run by a shell in a folder of their own, and in a network of their own, since they use the usual ports.
//! What is shown to be printed is compared, but for numbers.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::{Place, skipped};

/// A line that a person types.
struct Typed {
    command: String,
    /// The exit status that its comment names; 0 where it names none.
    status: i32,
}

/// The lines with a `$` in the first console block behind a heading.
fn typed(document: &str, heading: &str) -> Vec<Typed> {
    let section = document.split(&format!("\n{heading}\n")).nth(1).unwrap_or_else(|| panic!("there is no {heading}"));
    let block = section.split("```console\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let lines = block.lines().map(|line| line.strip_prefix("$ ").unwrap_or_else(|| panic!("'{line}' is no command")));
    let lines: Vec<Typed> = lines.map(of_line).collect();
    assert!(!lines.is_empty(), "{heading} has nothing to type");
    lines
}

/// The lines with a `$` in all console blocks of a document, but those that say that a test cannot run them.
fn typed_everywhere(document: &str) -> Vec<Typed> {
    let blocks = document.split("```console\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    let blocks = blocks.filter(|block| !block.starts_with("# Not run by the test: "));
    let lines = blocks.flat_map(str::lines);
    lines.map(|line| of_line(line.strip_prefix("$ ").unwrap_or_else(|| panic!("'{line}' is no command")))).collect()
}

fn of_line(line: &str) -> Typed {
    let (command, comment) = line.split_once(" # ").unwrap_or((line, ""));
    let status = comment.split("exit status ").nth(1).and_then(|rest| rest.chars().next()?.to_digit(10));
    Typed { command: command.trim().to_owned(), status: status.map_or(0, |status| status as i32) }
}

fn document(name: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    fs::read_to_string(root.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The lines as a script that notes the exit status of each. Behind a server it waits as a person does, until it is ready.
fn script(lines: &[Typed]) -> String {
    let mut script = "exec 2>&1\nset -m\nip link set lo up\n".to_owned();
    // Servers that run on this machine are not those that a person meets here.
    script += "for folder in /tmp/sealblock-$(id -u) /run/user/$(id -u); do\n";
    script += "  [ ! -d $folder ] || mount -t tmpfs none $folder\ndone\n";
    for Typed { command, .. } in lines {
        script += command;
        script += "\necho $? >> ../statuses\n";
        if command.ends_with('&') {
            script +=
                "for turn in $(seq 600); do (: <> /dev/tcp/127.0.0.1/4420) 2> /dev/null && break; sleep 0.1; done\n";
        }
    }
    script + "wait\n"
}

/// A shell with a network and mounts of its own, where that is allowed.
fn shell() -> Option<Command> {
    const WAYS: [&[&str]; 2] = [&["--net", "--mount"], &["--user", "--map-root-user", "--net", "--mount"]];
    let own = |options: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(options);
        command
    };
    let allowed = |options: &[&str]| {
        let mut command = own(options);
        command.args(["ip", "link", "set", "lo", "up"]).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    };
    WAYS.into_iter().find(|options| allowed(options)).map(own)
}

/// Types the lines, and gives what was answered.
#[track_caller]
fn run(lines: &[Typed]) -> Option<String> {
    let Some(mut command) = shell() else {
        skipped("there are no networks of one's own here (unshare, ip)");
        return None;
    };
    let place = Place::new();
    fs::create_dir(place.path("work")).unwrap();
    place.write("script", script(lines).as_bytes());
    let binary = Path::new(env!("CARGO_BIN_EXE_sealblock")).parent().unwrap();
    let path = format!("{}:{}", binary.display(), std::env::var("PATH").unwrap());
    command.args(["timeout", "300", "bash", "../script"]).current_dir(place.path("work")).env("PATH", path);
    command.env("XDG_RUNTIME_DIR", place.path(crate::common::RUNTIME_FOLDER)).stdin(Stdio::null());
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(!said.contains("panicked"), "{said}");
    let statuses = String::from_utf8(place.read("statuses")).unwrap();
    let statuses: Vec<&str> = statuses.lines().collect();
    assert_eq!(statuses.len(), lines.len(), "not every line was run:\n{said}");
    for (line, status) in lines.iter().zip(statuses) {
        assert_eq!(status, line.status.to_string(), "exit status of `{}`:\n{said}", line.command);
    }
    Some(said)
}

#[test]
fn the_tour_runs_as_written() {
    let lines = typed(&document("docs/tutorial.md"), "## A tour");
    let Some(said) = run(&lines) else { return };
    for words in ["\"lba\":7,", "nqn.2026-11.io.sealblock:v\n", "resized from 1 GiB to 2 GiB", "stopped\n"] {
        assert!(said.contains(words), "'{words}' is not in:\n{said}");
    }
}

#[test]
fn the_operations_guide_runs_as_written() {
    let document = document("docs/operations.md");
    let lines = typed_everywhere(&document);
    assert!(lines.len() > 60, "only {} lines were found", lines.len());
    let Some(said) = run(&lines) else { return };
    for words in ["block 7: guard", "1 damaged, 1 repaired", "split brain", "1 block of v lost", "degraded", "96 MiB"] {
        assert!(said.contains(words), "'{words}' is not in:\n{said}");
    }
}

/// Numbers, and identities that are drawn, are others each time.
fn without_numbers(line: &str) -> String {
    let mut text = String::new();
    for word in line.split_inclusive(|char: char| !char.is_ascii_alphanumeric()) {
        let is_number = word.starts_with(|char: char| char.is_ascii_digit());
        let end = word.trim_start_matches(|char: char| char.is_ascii_alphanumeric());
        text += if is_number { "N" } else { &word[..word.len() - end.len()] };
        text += end;
    }
    text.replace("N.N", "N")
}

#[test]
fn the_transcript_of_the_readme_is_what_is_printed() {
    let readme = document("README.md");
    let block = readme.split("```console\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let mut parts = block.split("$ ").skip(1).map(|part| part.split_once('\n').unwrap());
    let lines: Vec<Typed> = parts.clone().map(|(line, _)| of_line(line)).collect();
    let Some(said) = run(&lines) else { return };
    let is_drawn = |line: &&str| !line.starts_with("uuid ");
    let expected = parts.by_ref().flat_map(|(_, printed)| printed.lines()).filter(is_drawn).map(without_numbers);
    let printed = said.lines().filter(is_drawn).map(without_numbers);
    assert_eq!(printed.collect::<Vec<_>>(), expected.collect::<Vec<_>>(), "{said}");
}

#[test]
fn faults_of_the_readme_are_found_as_written() {
    let Some(said) = run(&typed(&document("README.md"), "## Testing software against PI and faults")) else { return };
    for words in ["101 damaged", "block 7: guard", "1 damaged"] {
        assert!(said.contains(words), "'{words}' is not in:\n{said}");
    }
}

#[test]
fn what_is_served_without_arguments_is_verified_as_written() {
    let readme = document("README.md");
    let serve = "cargo run --release -- serve";
    assert!(readme.contains(&format!("$ {serve} ")), "the README begins with a server");
    let verify = readme.lines().find_map(|line| line.strip_prefix("$ target/release/sealblock verify nvme+tcp://"));
    let lines = [
        "sealblock serve &".to_owned(),
        format!("sealblock verify nvme+tcp://{}", verify.unwrap()),
        "kill %1".to_owned(),
    ];
    let Some(said) = run(&lines.map(|line| of_line(&line))) else { return };
    assert!(said.contains("listening on 127.0.0.1:4420"), "{said}");
}

#[test]
fn faults_do_what_is_written() {
    let document = document("docs/targets.md");
    run(&typed(&document, "## Faults"));
    // Every rule of the table is one, and there are no others.
    let place = Place::new();
    let rows = document
        .split("\n## Faults\n")
        .nth(1)
        .unwrap()
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    let mut named: Vec<String> = rows.map(|rule| rule.replace("TIME", "10ms")).collect();
    for rule in &named {
        place.run(&format!("info fault:[{rule}],mem:1MiB")).succeeds();
    }
    named.push("seed=NUMBER".to_owned());
    let unknown = place.run("info fault:[nothing],mem:1MiB");
    let known = unknown.stderr.split("use ").nth(1).unwrap().lines().next().unwrap().replace(" or ", ", ");
    for rule in known.split(", ").filter(|rule| !rule.is_empty()) {
        let name = rule.split('=').next().unwrap();
        assert!(named.iter().any(|named| named.split('=').next() == Some(name)), "{rule} is not in docs/targets.md");
    }
}

/// All sources of programs, with texts over several lines in one.
fn sources(folder: &Path, text: &mut String) {
    for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && !name.starts_with('.') && !["target", "xtask", "proofs", "tests"].contains(&name.as_str()) {
            sources(&path, text);
        } else if name.ends_with(".rs") {
            let mut lines = fs::read_to_string(&path).unwrap();
            while let Some(at) = lines.find("\\\n") {
                let rest = lines[at + 2..].trim_start().to_owned();
                lines.truncate(at);
                lines += &rest;
            }
            *text += &lines;
        }
    }
}

#[test]
fn messages_of_the_troubleshooting_guide_are_those_of_the_program() {
    /// What the kernel says.
    const FOREIGN: [&str; 2] = ["connection refused", "address already in use"];
    let mut text = String::new();
    sources(Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap(), &mut text);
    let document = document("docs/troubleshooting.md");
    let messages = document.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    let mut checked = 0;
    for part in messages.flat_map(|message| message.split('…')) {
        let part = part.trim_matches(|char: char| " ;:,()".contains(char));
        if part.len() > 5 && !FOREIGN.contains(&part) {
            assert!(text.contains(part), "no source has '{part}'");
            checked += 1;
        }
    }
    assert!(checked > 25, "only {checked} parts of messages were found");
}
