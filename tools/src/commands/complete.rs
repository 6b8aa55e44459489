//! `sealblock completions`: what a shell loads; and the hidden `sealblock complete`, which that calls for each Tab.
//!
//! The program itself knows its commands, targets and running servers, so the scripts of bash, zsh and fish only pass the line to it and show
//! what it answers. A Tab never waits: servers have less than a second to answer, and whatever fails is silent.

use std::fs;
use std::io::{self, Write};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use clap::{Arg, Command, CommandFactory};
use clap_complete::Shell;
use sealblock_server::control::client::query_all;
use sealblock_server::status::server::ServerStatus;
use sealblock_stack::{StackError, printable};

use crate::cli::{Cli, Complete, Completions};
use crate::exit::Exit;
use crate::report::output_error;

/// How long running servers may take to answer.
const PATIENCE: Duration = Duration::from_millis(700);
/// The kinds of targets that begin with a word, as far as it is the same for all.
const SCHEMES: [&str; 12] = [
    "mirror:",
    "stripe:",
    "multipath:",
    "offset:",
    "fault:",
    "file:",
    "raw:",
    "mem:",
    "null:",
    "nvme+tcp://",
    "nbd://",
    "nbd+unix:///",
];
/// Those of them behind which other targets follow.
const WRAPPERS: [&str; 5] = ["mirror:", "multipath:", "stripe:", "file:", "raw:"];

/// A word that ends in one of these is not complete: no space follows.
const BASH: &str = r#"# Completions of sealblock for bash. The program itself completes: see `sealblock complete`.
_sealblock() {
    local candidate line="${COMP_LINE:0:COMP_POINT}"
    COMPREPLY=()
    while IFS= read -r candidate; do
        COMPREPLY+=("$candidate")
    done < <("${COMP_WORDS[0]}" complete bash "$line" "$COMP_WORDBREAKS" 2>/dev/null)
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[/:,=] ]]; then
        compopt -o nospace 2>/dev/null
    fi
}
complete -F _sealblock sealblock
"#;

const ZSH: &str = r#"#compdef sealblock
# Completions of sealblock for zsh. The program itself completes: see `sealblock complete`.
_sealblock() {
    local -a candidates open closed
    candidates=("${(@f)$("${words[1]}" complete zsh "${(j: :)words[1,CURRENT-1]} $PREFIX" 2>/dev/null)}")
    open=("${(@M)candidates:#*[/:,=]}")
    closed=("${(@)candidates:#*[/:,=]}")
    closed=("${(@)closed:#}")
    (( ${#open} )) && compadd -S '' -a open
    (( ${#closed} )) && compadd -a closed
}
if [ "$funcstack[1]" = "_sealblock" ]; then
    _sealblock "$@"
elif (( $+functions[compdef] )); then
    compdef _sealblock sealblock
fi
"#;

const FISH: &str = r#"# Completions of sealblock for fish. The program itself completes: see `sealblock complete`.
complete -c sealblock -f -a '(sealblock complete fish (commandline -cp) 2>/dev/null)'
"#;

/// Prints a script that completes commands, options, targets and names of running servers in a shell.
pub fn script_of(arguments: &Completions) -> Result<Exit, StackError> {
    let mut output = io::stdout().lock();
    let written = output.write_all(&script(arguments.shell)).and_then(|()| output.flush());
    written.map_err(|error| output_error(&error))?;
    Ok(Exit::Clean)
}

/// The generator panics when it cannot write, so it writes to memory, which takes all.
fn script(shell: Shell) -> Vec<u8> {
    match shell {
        Shell::Bash => BASH.into(),
        Shell::Zsh => ZSH.into(),
        Shell::Fish => FISH.into(),
        _ => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "sealblock", &mut script);
            script
        }
    }
}

/// Prints what the last word of a line may become, one candidate a line.
pub fn run(arguments: &Complete) -> Result<Exit, StackError> {
    let mut command = Cli::command();
    command.build();
    let breaks = arguments.breaks.as_deref().unwrap_or_default();
    let found = candidates(&command, &arguments.line, &|| running_servers());
    // Bash takes what is behind the last of these characters for the word.
    let kept = current_word(&arguments.line);
    let cut = kept.rfind(|c| matches!(c, ':' | '=') && breaks.contains(c)).map_or(0, |at| at + 1);
    let mut lines = String::new();
    for candidate in found.iter().filter_map(|candidate| candidate.get(cut..)) {
        // A name with a line in it cannot be told from two.
        if printable(candidate) == candidate {
            lines.push_str(candidate);
            lines.push('\n');
        }
    }
    // Whoever has closed the output wants no more.
    _ = io::stdout().write_all(lines.as_bytes());
    Ok(Exit::Clean)
}

/// What runs here, as far as it answers in time. A thread that waits longer ends with the process.
fn running_servers() -> Vec<ServerStatus> {
    let (answer, answers) = mpsc::channel();
    thread::spawn(move || {
        // Nobody waits for it any more, perhaps.
        _ = answer.send(query_all().into_iter().filter_map(|(_, server)| server.ok()).collect());
    });
    answers.recv_timeout(PATIENCE).unwrap_or_default()
}

/// The words of a line, as a shell parts them; the last one is what is being typed.
pub(crate) fn words(line: &str) -> Vec<String> {
    let (mut words, mut quote, mut chars) = (vec![String::new()], None, line.chars());
    while let Some(c) = chars.next() {
        let word = words.last_mut().expect("there is one from the start");
        match (c, quote) {
            ('\\', None) => word.extend(chars.next()),
            ('\'' | '"', None) => quote = Some(c),
            (c, Some(end)) if c == end => quote = None,
            (c, None) if c.is_whitespace() => {
                if !word.is_empty() {
                    words.push(String::new());
                }
            }
            (c, _) => word.push(c),
        }
    }
    words
}

fn current_word(line: &str) -> String {
    words(line).pop().unwrap_or_default()
}

/// What the last word of a line may become. `servers` is asked only where their names fit.
fn candidates(command: &Command, line: &str, servers: &dyn Fn() -> Vec<ServerStatus>) -> Vec<String> {
    let mut words = words(line);
    let current = words.pop().unwrap_or_default();
    let mut place = Place { command, positional: 0, value_of: None, is_literal: false };
    words.iter().skip(1).for_each(|word| place.pass(word));
    let mut found = place.candidates(&current, servers);
    // The beginning of a kind of targets that is there already is nothing to choose.
    found.retain(|candidate| {
        candidate.starts_with(&current) && (*candidate != current || !current.ends_with(['/', ':']))
    });
    found.sort();
    found.dedup();
    found
}

/// Where in a command line a word stands.
struct Place<'a> {
    command: &'a Command,
    /// Positional arguments before it.
    positional: usize,
    /// The option whose value it is.
    value_of: Option<&'a Arg>,
    /// Whether `--` stands before it.
    is_literal: bool,
}

impl<'a> Place<'a> {
    /// Goes on behind a word.
    fn pass(&mut self, word: &str) {
        if self.value_of.take().is_some() {
            return;
        }
        let options = || self.command.get_arguments().filter(|arg| arg.get_action().takes_values());
        match word {
            "--" => self.is_literal = true,
            _ if word.starts_with("--") && !self.is_literal => {
                self.value_of = options().find(|arg| arg.get_long() == Some(&word[2..]));
            }
            _ if word.starts_with('-') && word.len() > 1 && !self.is_literal => {
                self.value_of = options().find(|arg| arg.get_short() == word.chars().last());
            }
            _ => match self.command.find_subcommand(word) {
                Some(below) if self.positional == 0 => self.command = below,
                _ => self.positional += 1,
            },
        }
    }

    fn candidates(&self, current: &str, servers: &dyn Fn() -> Vec<ServerStatus>) -> Vec<String> {
        if let Some(arg) = self.value_of {
            return self.values(arg, current, servers);
        }
        if current.starts_with('-') && !self.is_literal {
            let options = self.command.get_arguments().filter(|arg| !arg.is_hide_set());
            return options.filter_map(|arg| Some(format!("--{}", arg.get_long()?))).collect();
        }
        if self.command.has_subcommands() {
            let shown = self.command.get_subcommands().filter(|below| !below.is_hide_set());
            return shown.map(|below| below.get_name().to_owned()).collect();
        }
        let mut arguments: Vec<&Arg> = self.command.get_positionals().collect();
        arguments.sort_by_key(|arg| arg.get_index());
        let repeated = arguments.last().filter(|arg| arg.get_num_args().is_some_and(|n| n.max_values() > 1));
        let arg = arguments.get(self.positional).or(repeated);
        arg.map_or(Vec::new(), |arg| self.values(arg, current, servers))
    }

    /// What a value may become, by its name in the help.
    fn values(&self, arg: &Arg, current: &str, servers: &dyn Fn() -> Vec<ServerStatus>) -> Vec<String> {
        let possible = arg.get_possible_values();
        if !possible.is_empty() {
            return possible
                .iter()
                .filter(|value| !value.is_hide_set())
                .map(|value| value.get_name().to_owned())
                .collect();
        }
        let names = arg.get_value_names().unwrap_or_default();
        let name = names.first().map(|name| name.as_str()).unwrap_or_default();
        match name {
            "TARGET" | "TARGET_A" | "TARGET_B" | "REPLICA" | "DEVICE" | "OLD" | "NEW" | "FROM" | "TO" | "VOLUME" => {
                let is_served = matches!(self.command.get_name(), "start" | "status" | "pause" | "stop" | "resize");
                targets(current, is_served, servers)
            }
            "SERVER" => server_names(&servers()),
            "N" if self.command.get_name() == "detach" => block_devices(),
            _ if name.starts_with("HOST[:PORT]") => addresses(&servers()),
            _ if name.starts_with("FILESYSTEM") => files(current),
            "FILE" | "PATH" | "DIR" | "DIRECTORY" | "FILE.html" | "PATH|none" => files(current),
            _ => Vec::new(),
        }
    }
}

/// Targets: files, kinds of targets, and what servers serve. Behind `mirror:a,` the next member is completed.
fn targets(current: &str, is_served: bool, servers: &dyn Fn() -> Vec<ServerStatus>) -> Vec<String> {
    let (head, tail) = current.split_at(member_start(current));
    let mut found = files(tail);
    found.extend(SCHEMES.iter().map(|scheme| (*scheme).to_owned()));
    // Of a path no name of a server is meant.
    if !tail.contains('/') || tail.contains("://") {
        for server in servers() {
            for device in server.devices {
                found.extend(device.exports.iter().filter_map(|export| export.uri.clone()));
                if is_served {
                    found.push(device.target);
                    found.extend(device.exports.into_iter().filter(|e| e.protocol == "nvme").map(|export| export.name));
                }
            }
        }
    }
    found.iter().map(|candidate| format!("{head}{candidate}")).collect()
}

/// Where the member begins that is being typed: behind the names of groups, brackets and members before it.
fn member_start(current: &str) -> usize {
    let mut at = 0;
    loop {
        let rest = &current[at..];
        let wrapper = WRAPPERS.iter().find(|wrapper| rest.starts_with(**wrapper)).map(|wrapper| wrapper.len());
        let chunked = || rest.starts_with("stripe-").then(|| rest.find(':')).flatten().map(|colon| colon + 1);
        // Rules and ranges come before the target behind a comma.
        let behind = || match rest.split(':').next() {
            Some("offset") => rest.find(','),
            Some("fault") => rest.find("],").map(|bracket| bracket + 1),
            _ => None,
        };
        let next = rest.find(['[', ',']).filter(|_| at > 0 || current.starts_with('[')).map(|comma| comma + 1);
        match wrapper.or_else(chunked).or_else(|| behind().map(|comma| comma + 1)).or(next) {
            Some(more) => at += more,
            None => return at,
        }
    }
}

/// Files that begin with this path; folders end in a slash.
fn files(start: &str) -> Vec<String> {
    let (folder, name) =
        start.rsplit_once('/').map_or(("", start), |(folder, name)| (&start[..folder.len() + 1], name));
    let there = fs::read_dir(if folder.is_empty() { "." } else { folder });
    let entries = there.into_iter().flatten().filter_map(Result::ok);
    let named = entries.filter_map(|entry| {
        let found = entry.file_name().into_string().ok()?;
        let is_wanted = found.starts_with(name) && (name.starts_with('.') || !found.starts_with('.'));
        let is_folder = fs::metadata(entry.path()).is_ok_and(|about| about.is_dir());
        is_wanted.then(|| format!("{folder}{found}{}", if is_folder { "/" } else { "" }))
    });
    named.collect()
}

fn server_names(servers: &[ServerStatus]) -> Vec<String> {
    let names = |server: &ServerStatus| {
        let listeners = server.listeners.iter().chain(&server.nbd_listeners).map(ToString::to_string);
        let devices = server.devices.iter().map(|device| device.target.clone());
        listeners.chain(devices).chain([server.pid.to_string()]).collect::<Vec<String>>()
    };
    servers.iter().flat_map(names).collect()
}

fn addresses(servers: &[ServerStatus]) -> Vec<String> {
    let of = |server: &ServerStatus| {
        let nbd = server.nbd_listeners.iter().map(|address| format!("nbd://{address}"));
        server.listeners.iter().map(ToString::to_string).chain(nbd).collect::<Vec<String>>()
    };
    servers.iter().flat_map(of).collect()
}

fn block_devices() -> Vec<String> {
    let there = fs::read_dir("/dev").into_iter().flatten().filter_map(Result::ok);
    let names = there.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.starts_with("ublkb")).map(|name| format!("/dev/{name}")).collect()
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;

    fn of(line: &str) -> Vec<String> {
        let mut command = Cli::command();
        command.build();
        candidates(&command, line, &Vec::new)
    }

    #[test]
    fn words_are_parted_as_a_shell_parts_them() {
        for (line, parted) in [
            ("sealblock ", vec!["sealblock", ""]),
            ("a  'b c'd \"e f", vec!["a", "b cd", "e f"]),
            ("a b\\ c", vec!["a", "b c"]),
            ("", vec![""]),
            ("a 'b ", vec!["a", "b "]),
        ] {
            assert_eq!(words(line), parted, "{line}");
        }
    }

    #[test]
    fn commands_options_and_values_are_completed_where_they_stand() {
        assert!(of("sealblock ").contains(&"verify".to_owned()) && !of("sealblock ").contains(&"complete".to_owned()));
        assert_eq!(of("sealblock mirror re"), ["remove", "replace"]);
        assert_eq!(of("sealblock create v --gu"), ["--guard"]);
        assert_eq!(of("sealblock create v --guard crc3"), ["crc32c"]);
        assert_eq!(of("sealblock log w"), ["warn"]);
        assert_eq!(of("sealblock verify v --rate "), Vec::<String>::new(), "nothing to guess");
        assert!(!of("sealblock verify -- --r").contains(&"--rate".to_owned()));
        for line in ["sealblock info ", "sealblock copy v ", "sealblock verify a b "] {
            let found = of(line);
            assert!(
                found.contains(&"mem:".to_owned()) && found.contains(&"Cargo.toml".to_owned()),
                "{line}: {found:?}"
            );
            assert!(!found.iter().any(|candidate| candidate.starts_with('-')), "{line}: {found:?}");
        }
    }

    #[test]
    fn members_of_groups_are_completed() {
        let (cargo, none) = (|head: &str| vec![format!("{head}Cargo.toml")], Vec::<String>::new());
        for head in [
            "mirror:",
            "mirror:a,",
            "mirror:[stripe:a,",
            "stripe-16KiB:",
            "stripe-nolabel:a,",
            "offset:0..7,",
            "raw:",
            "'fault:[read 5],",
        ] {
            assert_eq!(of(&format!("sealblock info {head}Car")), cargo(head.trim_start_matches('\'')), "{head}");
        }
        assert_eq!(of("sealblock info mirror:mul"), ["mirror:multipath:"]);
        assert_eq!(of("sealblock info offset:Car"), none, "that is no range");
        assert_eq!(
            of("sealblock info src/commands/comp"),
            ["src/commands/compare.rs", "src/commands/compare/", "src/commands/complete.rs"]
        );
    }

    #[test]
    fn scripts_of_all_shells_complete_the_program() {
        for shell in Shell::value_variants() {
            let script = String::from_utf8(script(*shell)).unwrap();
            assert!(script.contains(&format!("complete {shell}")) || script.contains("accept-stale"), "{shell}");
        }
    }
}
