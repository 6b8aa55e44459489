//! Command lines that are good, with what they mean, and command lines that are bad, with why.

use clap::CommandFactory;
use clap::error::ErrorKind;

use sealblock_exports_nvme_tcp::PiVisibility;
use sealblock_integrity::GuardKind;
use sealblock_server::control::socket_path::ControlSocket;
use sealblock_stack::Usage;

use super::*;

fn parse(line: &str) -> Result<Command, clap::Error> {
    Cli::try_parse_from(std::iter::once("sealblock").chain(line.split_whitespace())).map(Cli::into_command)
}

fn good(line: &str) -> Command {
    parse(line).unwrap_or_else(|error| panic!("{line}: {error}"))
}

#[test]
fn the_definition_is_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn every_command_has_help_with_an_example() {
    for command in Cli::command().get_subcommands_mut() {
        let help = command.render_help().to_string();
        let example = format!("  sealblock {}", command.get_name());
        assert!(help.contains("Example") && help.contains(&example), "{help}");
    }
}

/// The words of a line of a shell, up to its comment.
fn words(line: &str) -> Vec<String> {
    let mut words = crate::commands::complete::words(line);
    words.truncate(words.iter().position(|word| word.starts_with('#')).unwrap_or(words.len()));
    words.pop_if(|word| word.is_empty());
    words
}

/// The commands of this program in a line of a shell: the words behind its name.
pub(super) fn typed_commands(line: &str) -> Vec<Vec<String>> {
    let names = ["sealblock", "target/release/sealblock", "cargo run --release --"].map(words);
    let words = words(line);
    let commands = words.split(|word| ["|", "&&", "||", "&", ";"].contains(&word.as_str()));
    let typed = commands.filter_map(|command| {
        // What stands before the name: `sudo -u USER`, and settings of variables.
        let mut rest = command;
        while let [first, behind @ ..] = rest {
            rest = match first.as_str() {
                "-u" => behind.get(1..)?,
                word if word == "sudo" || word.contains('=') => behind,
                _ => break,
            };
        }
        let command = names.iter().find_map(|name| rest.strip_prefix(name.as_slice()))?;
        let is_redirected =
            |word: &String| word.trim_start_matches(|char: char| char.is_ascii_digit()).starts_with(['<', '>']);
        let end = command.iter().position(is_redirected).unwrap_or(command.len());
        Some(command[..end].to_vec())
    });
    // What is left out in the document, or filled in by the shell, cannot be parsed here.
    typed.filter(|words| !words.iter().any(|word| word.contains("...") || word.contains('$'))).collect()
}

#[test]
fn every_command_in_the_documents_is_one() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let folders = ["", "docs", "docs/formats", "docs/decisions", "packaging"].map(|folder| root.join(folder));
    let files = folders.iter().flat_map(|folder| std::fs::read_dir(folder).unwrap()).map(|entry| entry.unwrap().path());
    let mut parsed = 0;
    for file in files.filter(|file| file.extension().is_some_and(|extension| extension == "md")) {
        let text = std::fs::read_to_string(&file).unwrap();
        for line in text.lines().filter_map(|line| line.trim_start().strip_prefix("$ ")) {
            for words in typed_commands(line) {
                let command = Cli::try_parse_from(std::iter::once("sealblock".to_owned()).chain(words));
                if let Err(error) = command.map(Cli::into_command) {
                    // Help and versions are no errors, and the files are not there.
                    let is_missing = error.to_string().contains("is a file or a block device");
                    assert!(!error.use_stderr() || is_missing, "{}: {line}\n{error}", file.display());
                }
                parsed += 1;
            }
        }
    }
    assert!(parsed > 150, "only {parsed} commands were found");
    // Twin: what is no command is refused.
    assert!(parse("verify v --repairs").is_err_and(|error| error.use_stderr()));
    let [typed] = &typed_commands("sudo -u sealblock sealblock create 'a b' --size 1GiB > out   # comment")[..] else {
        panic!("one command")
    };
    assert_eq!(typed.join("|"), "create|a b|--size|1GiB");
}

#[test]
fn create_has_its_defaults() {
    let Command::Create(create) = good("create v --size 1GiB") else { panic!("another command") };
    assert_eq!(create.volume.path(), std::path::Path::new("v"));
    assert_eq!((create.size.get(), create.block_size), (1 << 30, BlockSize::B4096));
    assert_eq!(
        (create.guard, create.protection_type, create.force),
        (Some(GuardKind::Crc32c), ProtectionType::Type1, false)
    );
    let line = "create file:-x --size 8192 --block-size 512 --guard none --type 3 --force";
    let Command::Create(create) = good(line) else { panic!("another command") };
    assert_eq!((create.block_size, create.guard), (BlockSize::B512, None));
    assert_eq!((create.protection_type, create.force), (ProtectionType::Type3, true));
}

#[test]
fn verify_has_its_defaults() {
    let Command::Verify(verify) = good("verify mirror:a,b") else { panic!("another command") };
    assert_eq!((verify.range, verify.mode, verify.rate), (None, Mode::Auto, None));
    assert!(!verify.repair && !verify.json && !verify.quiet);
    let line = "verify v --range 5.. --mode offload --repair --rate 1MiB/s --json";
    let Command::Verify(verify) = good(line) else { panic!("another command") };
    assert_eq!(verify.range, Some("5..".parse().unwrap()));
    assert_eq!(verify.rate.unwrap().bytes_per_second().get(), 1 << 20);
    assert!(verify.mode == Mode::Offload && verify.repair && verify.json);
}

#[test]
fn labels_of_stripes_are_left_out_where_that_is_said() {
    let unlabelled: TargetName = "stripe-nolabel:a,b".parse().unwrap();
    let Command::Zero(zero) = good("zero stripe:a,b --no-label") else { panic!("another command") };
    assert_eq!(zero.target, unlabelled);
    let Command::Copy(copy) = good("copy f stripe:a,b --no-label --force-member") else { panic!("another command") };
    assert!(copy.to == Endpoint::Target(unlabelled.clone()) && copy.members.usage() == Usage::Forced);
    let Command::Serve(serve) = good("serve a stripe:a,b --no-label") else { panic!("another command") };
    assert_eq!(serve.targets, ["a".parse().unwrap(), unlabelled]);
    for line in ["serve a --as-member --read-only", "serve a --as-member --force-member"] {
        assert_eq!(parse(line).unwrap_err().kind(), ErrorKind::ArgumentConflict, "{line}");
    }
}

#[test]
fn compare_takes_two_targets_or_one_and_zeroes() {
    let (a, b): (TargetName, TargetName) = ("a".parse().unwrap(), "mem:4KiB".parse().unwrap());
    let Command::Compare(pair) = good("compare a mem:4KiB --json") else { panic!("another command") };
    assert_eq!(pair.comparison(), Some(Comparison::Pair(&a, &b)));
    let Command::Compare(zero) = good("compare --zero a") else { panic!("another command") };
    assert_eq!(zero.comparison(), Some(Comparison::Zeroes(&a)));
    for (line, kind) in [
        ("compare", ErrorKind::MissingRequiredArgument),
        ("compare a", ErrorKind::MissingRequiredArgument),
        ("compare a b --zero c", ErrorKind::ArgumentConflict),
        ("compare a b c", ErrorKind::UnknownArgument),
    ] {
        assert_eq!(parse(line).unwrap_err().kind(), kind, "{line}");
    }
}

#[test]
fn the_other_commands_read_their_arguments() {
    let Command::Zero(zero) = good("zero v --range 1..2 --no-unmap") else { panic!("another command") };
    assert!(zero.no_unmap && zero.how.range == Some("1..2".parse().unwrap()) && !zero.how.yes);
    let Command::Discard(discard) = good("discard v --yes --json") else { panic!("another command") };
    assert!(discard.how.range.is_none() && discard.how.yes && discard.how.json);
    let Command::Copy(copy) = good("copy - ./- --salvage --json") else { panic!("another command") };
    assert!(copy.from == Endpoint::Standard && copy.salvage && copy.json);
    assert_eq!(copy.to.to_string(), "./-");
    let Command::Corrupt(corrupt) = good("corrupt v --lba 7 --kind lost-write") else { panic!("another command") };
    assert_eq!((corrupt.lba, corrupt.kind), (Lba::new(7), CorruptionKind::LostWrite));
    let Command::Demo(demo) = good("demo") else { panic!("another command") };
    assert_eq!(demo.dir, PathBuf::from("sealblock-data"));
    assert!(matches!(good("info v --json"), Command::Info(Info { json: true, .. })));
}

#[test]
fn serve_and_discover_read_their_arguments() {
    let Command::Serve(serve) = good("serve") else { panic!("another command") };
    assert!(serve.targets.is_empty() && serve.listen.is_empty() && serve.config.is_none() && serve.nbd.is_empty());
    assert_eq!((serve.protection, serve.cores, serve.read_only, serve.json), (None, None, false, false));
    let host = "nqn.2026-01.org.example:host";
    let line = format!(
        "serve v mem:1MiB --listen [::1] --listen 0.0.0.0:0 --allow-host {host} --protection shown --cores 2 --read-only"
    );
    let Command::Serve(serve) = good(&line) else { panic!("another command") };
    assert_eq!(serve.targets.len(), 2);
    assert_eq!(serve.listen, ["[::1]:4420".parse().unwrap(), "0.0.0.0:0".parse().unwrap()]);
    assert_eq!((serve.allow_host[0].as_str(), serve.protection), (host, Some(PiVisibility::Protected)));
    assert_eq!((serve.cores.map(usize::from), serve.read_only), (Some(2), true));
    let Command::Discover(discover) = good("discover [::1]:8009 --json") else { panic!("another command") };
    assert_eq!((discover.server.to_string(), discover.json), ("[::1]:8009".to_owned(), true));
    let Command::Discover(discover) = good("discover nbd://localhost/") else { panic!("another command") };
    assert_eq!(discover.server.to_string(), "nbd://localhost");
}

#[test]
fn scrub_reads_its_arguments() {
    let Command::Scrub(scrub) = good("scrub start v --rate 1MiB/s --from 7 --control c") else {
        panic!("another command")
    };
    let ScrubCommand::Start(start) = scrub.command else { panic!("another order") };
    assert_eq!((start.rate.unwrap().bytes_per_second().get(), start.from), (1 << 20, Some(Lba::new(7))));
    assert_eq!((start.what.target.to_string(), start.what.control), ("v".to_owned(), Some(PathBuf::from("c"))));
    let Command::Serve(serve) = good("serve v --scrub-every 7d --scrub-rate 1MiB/s --control none") else {
        panic!("another command")
    };
    assert_eq!((serve.scrub_every.unwrap().0.as_secs(), serve.control), (604_800, Some(ControlSocket::None)));
    let Command::Serve(serve) = good("serve v --control none/c") else { panic!("another command") };
    assert_eq!((serve.scrub_rate, serve.control), (None, Some(ControlSocket::Path("none/c".into()))));
}

#[test]
fn bad_usage_has_exit_status_2_and_says_why() {
    for (line, why) in [
        ("create v", "--size"),
        ("create v --size lots", "not a size"),
        ("create v --size 1MiB --block-size 1024", "512 or 4096"),
        ("create v --size 1MiB --guard md5", "crc16"),
        ("create v --size 1MiB --type 4", "possible values: 1, 2, 3"),
        ("create mem:1MiB --size 1MiB", "a file or a block device"),
        ("verify", "TARGET"),
        ("verify -", "accepted only by copy"),
        ("verify mirror:a", "column 8: a mirror needs at least two targets; try mirror:A,B"),
        ("verify v --range 9..5", "ends before it begins"),
        ("verify v --rate 100MiB", "100MiB/s"),
        ("verify v --mode fast", "emulate"),
        ("verify v --json --quiet", "cannot be used with"),
        ("corrupt v --lba -1 --kind data", "-1"),
        ("corrupt v --lba +1 --kind data", "from 0 to 2^64 - 1"),
        ("corrupt v --lba 1 --kind rust", "misdirected"),
        ("serve --listen localhost:1", "127.0.0.1:4420"),
        ("serve --cores 0", "must be a number of at least 1"),
        ("serve --allow-host me", "nqn.yyyy-mm"),
        ("serve v --config c", "cannot be used with"),
        ("serve v --scrub-every soon", "500ms or 7d"),
        ("serve v --scrub-every 999ms", "at least 1s"),
        ("serve v --scrub-rate 50MiB", "100MiB/s"),
        ("log 4711", "'4711' is not a log level: off, error, warn, info, debug"),
        ("log 4711 debug", "The level comes first: sealblock log LEVEL [SERVER]"),
        ("scrub v", "unrecognized subcommand"),
        ("scrub start", "TARGET"),
        ("scrub start v --from x", "from 0 to 2^64 - 1"),
        ("scrub stop v --rate 1MiB/s", "unexpected argument"),
        ("scrub status nqn.bad", "file:nqn.bad"),
        ("discover", "HOST"),
        ("discover host/path", "'/'"),
        ("discover nbd://host/export", "'/'"),
        ("frobnicate", "unrecognized subcommand"),
    ] {
        let error = parse(line).unwrap_err();
        assert_eq!(error.exit_code(), 2, "{line}");
        assert!(error.to_string().contains(why), "{line}: {error}");
    }
}
