//! `sealblock man`: the manual pages, one for the program and one for each command.
//!
//! Options and subcommands are set by `clap_mangen`. Synopses, tables, examples and the line at the foot of a page are made
//! here: the generator leaves values out of synopses, and fills tables as if they were paragraphs.

mod roff;

use std::env;
use std::fs;
use std::io;
use std::path::Path;

use clap::{Arg, ArgAction, Command, CommandFactory};
use clap_mangen::Man as Generator;
use sealblock_server::dates::{day, unix_s};
use sealblock_stack::StackError;

use self::roff::{Page, escape};
use crate::cli::{Cli, Man};
use crate::exit::Exit;
use crate::new_file;

/// Seconds since 1970 that pages are dated by, where builds are to be the same at any time (reproducible-builds.org).
const EPOCH_VARIABLE: &str = "SOURCE_DATE_EPOCH";
/// The commented example of a configuration.
const CONFIGURATION: &str = include_str!("../../../docs/sealblock.toml");
/// What stands at the top of each page.
const MANUAL: &str = "sealblock manual";

/// Every variable that the program reads, for the program's own page.
const ENVIRONMENT: &str = "\
Environment:
  SEALBLOCK_RUNTIME  `uring` needs io_uring and ends without it; `syscalls` does without; `auto` is the default: io_uring where the kernel
                     allows it
  SEALBLOCK_LOG      how much `serve` and `attach` log without --log: off, error, warn (the default), info or debug
  XDG_RUNTIME_DIR    the directory of control sockets of this user's servers
  NO_COLOR           with any value, help on a terminal has no colours
  COLUMNS            how wide help is where standard output is no terminal
  NOTIFY_SOCKET      set by a service manager, which is told when the server is ready, reloading and stopping
  LISTEN_FDS, LISTEN_PID, LISTEN_FDNAMES
                     set by a service manager that opens the sockets of `serve`
  SOURCE_DATE_EPOCH  the date of manual pages that `man` writes";

const FILES: &str = "\
Files:
  ./sealblock.toml            the configuration of `serve` without targets; see sealblock.toml(5)
  /etc/sealblock/sealblock.toml
                              the configuration of the service
  /run/sealblock/control.sock the control socket of the service
  /etc/nvme/hostnqn           the name of this machine for NVMe/TCP servers; without it one is made from /etc/machine-id";

/// For pages whose text does not say more.
const EXIT_STATUS: &str = "\
Exit status:
  0         clean
  1         damage or a difference was found
  2         bad usage
  3         the command failed
  4         not everything could be checked, or a copy is missing or out of sync
  130, 143  ended by SIGINT or SIGTERM";

/// Writes the pages into the folder, which is made if it is not there.
pub fn run(arguments: &Man) -> Result<Exit, StackError> {
    let dir = arguments.dir.as_path();
    write(dir).map_err(|error| StackError::at_path("write manual pages to", &error, dir))?;
    Ok(Exit::Clean)
}

fn write(dir: &Path) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    let mut command = Cli::command().disable_help_subcommand(true);
    command.build();
    write_page_of(&command, dir, &day(today()))?;
    new_file::replace(&dir.join("sealblock.toml.5"), config_page(&day(today())).as_bytes())
}

/// The page of the configuration, which is its commented example: what stands there is read by a test of the server.
fn config_page(date: &str) -> String {
    let mut page = Page::default();
    let version = env!("CARGO_PKG_VERSION");
    page.raw(&format!(".TH sealblock.toml 5 {date} \"sealblock {version}\" \"{MANUAL}\"\n.nh\n.ad l\n"));
    page.heading("Name");
    page.text("sealblock.toml - configuration of sealblock serve");
    page.heading("Description");
    page.text("What `sealblock serve --config FILE` reads, and `sealblock serve` without targets in the current directory. On SIGHUP a");
    page.text("running server reads it again and changes what differs; a configuration with an error changes nothing.");
    page.text("Below is every key, each with its default or an example.");
    page.heading("Configuration");
    CONFIGURATION.lines().for_each(|line| page.example(line));
    page.heading("See also");
    page.text("sealblock-serve(1)");
    page.into_text()
}

fn write_page_of(command: &Command, dir: &Path, date: &str) -> io::Result<()> {
    for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
        write_page_of(below, dir, date)?;
    }
    let name = name_of(command);
    new_file::replace(&dir.join(format!("{name}.1")), page(command, date)?.as_bytes())
}

/// The name of a command's page.
fn name_of(command: &Command) -> &str {
    command.get_display_name().unwrap_or_else(|| command.get_name())
}

fn page(command: &Command, date: &str) -> io::Result<String> {
    let source = format!("sealblock {}", env!("CARGO_PKG_VERSION"));
    let generator = Generator::new(command.clone()).title(name_of(command)).date(date).source(source).manual(MANUAL);
    let mut page = Page::default();
    page.raw(".ie \\n(.g .ds Aq \\(aq\n.el .ds Aq '\n");
    let put = |page: &mut Page, section: fn(&Generator, &mut dyn io::Write) -> io::Result<()>| {
        let mut text = Vec::new();
        section(&generator, &mut text)?;
        page.raw(&without_preamble(&String::from_utf8_lossy(&text)));
        io::Result::Ok(())
    };
    put(&mut page, Generator::render_title)?;
    // Names of options and targets are not broken at the end of a line.
    page.raw(".nh\n.ad l\n");
    put(&mut page, Generator::render_name_section)?;
    page.heading("Synopsis");
    page.raw(&format!("{}\n", synopsis(command)));
    put(&mut page, Generator::render_description_section)?;
    put(&mut page, Generator::render_options_section)?;
    if command.has_subcommands() {
        put(&mut page, Generator::render_subcommands_section)?;
    }
    if let Some(text) = command.get_after_long_help().or_else(|| command.get_after_help()) {
        page.sections(&text.to_string());
    }
    let is_program = name_of(command) == "sealblock";
    if is_program {
        page.sections(ENVIRONMENT);
        page.sections(FILES);
    } else if !page.has("EXIT STATUS") {
        page.sections(EXIT_STATUS);
    }
    if let Some((parent, _)) = name_of(command).rsplit_once('-').filter(|_| command.get_bin_name() != Some("sealblock"))
    {
        page.heading("See also");
        page.text(&format!("{parent}(1)"));
    }
    Ok(page.into_text())
}

/// A section without the definitions that stand at the head of the page once.
fn without_preamble(section: &str) -> String {
    let lines = section.lines().filter(|line| !line.starts_with(".ie ") && !line.starts_with(".el "));
    lines.map(|line| format!("{line}\n")).collect()
}

/// How a command is called, with the names of its values.
fn synopsis(command: &Command) -> String {
    let mut words = vec![format!("\\fB{}\\fR", escape(command.get_bin_name().unwrap_or(command.get_name())))];
    let shown = |arg: &&Arg| {
        !arg.is_hide_set() && !matches!(arg.get_action(), ArgAction::Help | ArgAction::HelpShort | ArgAction::HelpLong)
    };
    let (mut required, optional): (Vec<&Arg>, Vec<&Arg>) =
        command.get_arguments().filter(shown).partition(|arg| arg.is_required_set());
    required.sort_by_key(|arg| arg.get_index());
    let (positional, options): (Vec<&Arg>, Vec<&Arg>) = optional.into_iter().partition(|arg| arg.is_positional());
    words.extend(options.iter().map(|arg| format!("[{}]", usage(arg))));
    words.extend(required.iter().map(|arg| usage(arg)));
    words.extend(positional.iter().map(|arg| format!("[{}]", usage(arg))));
    if command.has_subcommands() {
        words.push("\\fICOMMAND\\fR".to_owned());
    }
    words.join(" ")
}

/// An option or argument as it is typed.
fn usage(arg: &Arg) -> String {
    let names: Vec<&str> = arg.get_value_names().into_iter().flatten().map(|name| name.as_str()).collect();
    let several =
        matches!(arg.get_action(), ArgAction::Append) || arg.get_num_args().is_some_and(|n| n.max_values() > 1);
    let values =
        if arg.get_action().takes_values() { format!("\\fI{}\\fR", escape(&names.join(" "))) } else { String::new() };
    let option = match (arg.get_long(), arg.get_short()) {
        (Some(long), _) => format!("\\fB{}\\fR ", escape(&format!("--{long}"))),
        (None, Some(short)) => format!("\\fB{}\\fR ", escape(&format!("-{short}"))),
        (None, None) => String::new(),
    };
    let dots = if several { " ..." } else { "" };
    format!("{}{dots}", format!("{option}{values}").trim_end())
}

/// The moment that pages are dated by, in seconds since 1970.
fn today() -> u64 {
    env::var(EPOCH_VARIABLE).ok().and_then(|text| text.parse().ok()).unwrap_or_else(unix_s)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::{Command as Program, Stdio};

    use super::*;
    use crate::exit::status;
    use sealblock_stack::Cause;

    fn page_of(words: &[&str]) -> String {
        let mut command = Cli::command().disable_help_subcommand(true);
        command.build();
        let found = words.iter().fold(&command, |command, word| command.find_subcommand(word).unwrap());
        page(found, "2026-11-23").unwrap()
    }

    #[test]
    fn there_is_a_page_for_each_command() {
        let dir = std::env::temp_dir().join(format!("sealblock-man-{}", std::process::id()));
        assert_eq!(run(&Man { dir: dir.clone() }), Ok(Exit::Clean));
        for command in Cli::command().get_subcommands().filter(|command| !command.is_hide_set()) {
            let page = fs::read_to_string(dir.join(format!("sealblock-{}.1", command.get_name()))).unwrap();
            assert!(page.contains("\n.SH EXAMPLES\n.EX\nsealblock "), "{page}");
            assert!(!page.contains("EXTRA"), "{page}");
            assert!(page.to_lowercase().contains("exit status"), "{page}");
        }
        assert!(fs::read_to_string(dir.join("sealblock.1")).unwrap().contains("\n.SH EXIT STATUS\n"));
        assert!(dir.join("sealblock-mirror-create.1").exists() && !dir.join("sealblock-complete.1").exists());
        let config = fs::read_to_string(dir.join("sealblock.toml.5")).unwrap();
        assert!(config.contains("\n.EX\n") && config.contains("[[subsystems]]"), "{config}");
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_page_says_of_what_and_of_when_it_is() {
        let title =
            format!(".TH sealblock-create 1 2026-11-23 \"sealblock {}\" \"{MANUAL}\"", env!("CARGO_PKG_VERSION"));
        let page = page_of(&["create"]);
        assert!(page.lines().any(|line| line.trim_end() == title), "{title}\n{page}");
        assert!(page.ends_with(".SH SEE ALSO\nsealblock(1)\n"), "{page}");
        assert!(page_of(&["mirror", "add"]).ends_with("sealblock\\-mirror(1)\n"));
        assert!(!page_of(&[]).contains("SEE ALSO"));
    }

    #[test]
    fn every_variable_of_the_program_is_on_its_page() {
        let page = page_of(&[]).replace("\\-", "-");
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let mut folders: Vec<_> =
            ["tools/src", "server/src", "stack/src", "runtime"].map(|name| root.join(name)).into();
        let mut found = 0;
        while let Some(folder) = folders.pop() {
            for path in fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
                if path.is_dir() {
                    folders.push(path);
                    continue;
                }
                let text = fs::read_to_string(&path).unwrap_or_default();
                for name in text.split('"').filter(|name| name.starts_with(concat!("SEAL", "BLOCK_"))) {
                    let is_name = name.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_');
                    let is_for_users = is_name && !["TEST", "VERSION"].iter().any(|word| name.contains(word));
                    assert!(!is_for_users || page.contains(name), "{name} of {}", path.display());
                    found += usize::from(is_for_users);
                }
            }
        }
        assert!(found >= 2, "they are read there");
        for name in [EPOCH_VARIABLE, "XDG_RUNTIME_DIR", "NOTIFY_SOCKET", "NO_COLOR"] {
            assert!(page.contains(name), "{name}");
        }
        assert_eq!(page.matches(".SH EXIT STATUS").count(), 1);
    }

    #[test]
    fn synopses_name_values() {
        let synopsis = |words: &[&str]| {
            let page = page_of(words);
            let line = page.split(".SH SYNOPSIS\n").nth(1).unwrap().lines().next().unwrap().to_owned();
            line.replace("\\fB", "").replace("\\fI", "").replace("\\fR", "").replace("\\-", "-")
        };
        assert_eq!(
            synopsis(&["create"]),
            "sealblock create [--block-size 512|4096] [--guard GUARD] [--type TYPE] [--shards N] [--preallocate] [--force] [--json] --size SIZE VOLUME"
        );
        assert!(synopsis(&["serve"]).starts_with("sealblock serve [--config FILE] [--listen ADDR:PORT ...] "));
        assert!(synopsis(&["serve"]).ends_with(" [TARGET ...]"));
        assert_eq!(synopsis(&["mirror", "add"]), "sealblock mirror add [--force] [--control PATH] TARGET REPLICA");
        assert!(synopsis(&[]).ends_with(" COMMAND"));
    }

    #[test]
    fn rows_of_tables_stay_apart() {
        let page = page_of(&[]);
        for row in [
            ".TP\n\\fB1\\fR\nthe command worked and found damage or a difference\n",
            ".TP\n\\fBmirror:A,B stripe:A,B multipath:A,B\\fR\na group of targets as one device; stripe\\-16KiB:A,B sets the chunk size, stripe\\-nolabel:A,B is for members without labels\n.TP\n",
        ] {
            assert!(page.contains(row), "{row}\nis not in\n{page}");
        }
    }

    #[test]
    fn formatters_take_every_page() {
        let mut command = Cli::command().disable_help_subcommand(true);
        command.build();
        let mut pages = vec![page(&command, "2026-11-23").unwrap()];
        let mut commands: Vec<&Command> = command.get_subcommands().collect();
        while let Some(next) = commands.pop() {
            pages.push(page(next, "2026-11-23").unwrap());
            commands.extend(next.get_subcommands());
        }
        pages.push(config_page("2026-11-23"));
        for text in pages {
            let mut groff = Program::new("groff");
            groff.args(["-man", "-Tutf8", "-ww"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
            let Ok(mut child) = groff.spawn() else {
                return eprintln!("skipped: there is no groff here");
            };
            child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
            let output = child.wait_with_output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success() && said.is_empty(), "{said}\n{text}");
        }
    }

    #[test]
    fn a_folder_that_cannot_be_is_named() {
        let failure = run(&Man { dir: "/dev/null/pages".into() }).unwrap_err();
        assert_eq!(status(failure.cause()), 3);
        assert_eq!(failure.cause(), Cause::Io);
        assert!(
            failure.to_string().starts_with("sealblock: cannot write manual pages to '/dev/null/pages': "),
            "{failure}"
        );
    }
}
