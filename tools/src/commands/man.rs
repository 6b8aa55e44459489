//! `sealblock man`: the manual pages, one for the program and one for each command; and `sealblock completions`: what shells complete.
//!
//! Options and subcommands are set by `clap_mangen`. Synopses, tables, examples and the line at the foot of a page are made
//! here: the generator leaves values out of synopses, and fills tables as if they were paragraphs.

mod after;
mod roff;

use std::env;
use std::fs;
use std::io::{self, Write};
use std::path::Path;

use clap::{Arg, ArgAction, Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man as Generator;
use sealblock_server::dates::{day, unix_s};
use sealblock_stack::StackError;

use self::roff::{Page, escape};
use crate::cli::{Cli, Completions, Man};
use crate::exit::Exit;
use crate::new_file;

/// Seconds since 1970 that pages are dated by, where builds are to be the same at any time (reproducible-builds.org).
const EPOCH_VARIABLE: &str = "SOURCE_DATE_EPOCH";
/// What stands at the top of each page.
const MANUAL: &str = "sealblock manual";

/// Writes the pages into the folder, which is made if it is not there.
pub fn run(arguments: &Man) -> Result<Exit, StackError> {
    let dir = arguments.dir.as_path();
    write(dir).map_err(|error| StackError::io("write manual pages to", &error).on(dir.display()))?;
    Ok(Exit::Clean)
}

/// Prints a script that completes commands and options in a shell.
pub fn completions(arguments: &Completions) -> Result<Exit, StackError> {
    let mut output = io::stdout().lock();
    let written = output.write_all(&script(arguments.shell)).and_then(|()| output.flush());
    written.map_err(|error| StackError::io("print completions", &error))?;
    Ok(Exit::Clean)
}

/// The generator panics when it cannot write, so it writes to memory, which takes all.
fn script(shell: Shell) -> Vec<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "sealblock", &mut script);
    script
}

fn write(dir: &Path) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    let mut command = Cli::command().disable_help_subcommand(true);
    command.build();
    write_page_of(&command, dir, &day(today()))
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
        after::put(&mut page, &text.to_string());
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
    use std::process::{Command as Program, Stdio};

    use super::*;
    use crate::exit::status;
    use clap::ValueEnum;
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
        for command in Cli::command().get_subcommands() {
            let page = fs::read_to_string(dir.join(format!("sealblock-{}.1", command.get_name()))).unwrap();
            assert!(page.contains("\n.SH EXAMPLES\n.EX\nsealblock "), "{page}");
            assert!(!page.contains("EXTRA"), "{page}");
        }
        assert!(fs::read_to_string(dir.join("sealblock.1")).unwrap().contains("\n.SH EXIT STATUS\n"));
        assert!(dir.join("sealblock-mirror-create.1").exists());
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
    fn synopses_name_values() {
        let synopsis = |words: &[&str]| {
            let page = page_of(words);
            let line = page.split(".SH SYNOPSIS\n").nth(1).unwrap().lines().next().unwrap().to_owned();
            line.replace("\\fB", "").replace("\\fI", "").replace("\\fR", "").replace("\\-", "-")
        };
        assert_eq!(
            synopsis(&["create"]),
            "sealblock create [--block-size 512|4096] [--guard GUARD] [--type TYPE] [--preallocate] [--force] [--json] --size SIZE VOLUME"
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
            ".TP\n\\fBmirror:A,B stripe:A,B multipath:A,B\\fR\na group of targets as one device; stripe\\-16KiB:A,B sets the chunk size,\n\
             stripe\\-nolabel:A,B is for members without labels\n.TP\n",
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

    #[test]
    fn every_shell_completes_every_command() {
        for shell in Shell::value_variants() {
            let script = String::from_utf8(script(*shell)).unwrap();
            for command in Cli::command().get_subcommands() {
                assert!(script.contains(command.get_name()), "{shell}: {}", command.get_name());
            }
        }
    }
}
