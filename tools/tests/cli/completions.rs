//! What Tab makes of a line: in bash itself, and in zsh and fish where they are installed.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::server::Server;
use crate::common::{Place, answer, has, noise, skipped};

/// A script of a shell, which knows the program as `sealblock` and has its completions in `$SCRIPT`.
fn in_shell(place: &Place, shell: &str, script: &str) -> String {
    place.write("script", &place.run(&format!("completions {shell}")).succeeds().stdout);
    let folder = Path::new(env!("CARGO_BIN_EXE_sealblock")).parent().unwrap();
    let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap_or_default());
    let mut command = Command::new(shell);
    command.args(if shell == "zsh" { vec!["-f", "-c", script] } else { vec!["-c", script] });
    command.current_dir(place.path("")).env("PATH", path).env("SCRIPT", place.path("script"));
    command.env("XDG_RUNTIME_DIR", place.path(crate::common::RUNTIME_FOLDER)).env("TERM", "dumb");
    command.env("HOME", place.path("")).stdin(Stdio::null());
    answer(&mut command).succeeds().text()
}

/// What bash would insert, or list, of a line that is typed to its end.
fn in_bash(place: &Place, line: &str) -> Vec<String> {
    // As readline parts the line: at spaces, and at the characters of `COMP_WORDBREAKS`, which are words of their own.
    let script = r#"source "$SCRIPT"
        COMP_LINE=$LINE COMP_POINT=${#LINE} COMP_WORDS=(sealblock)
        $(complete -p sealblock | sed 's/.*-F \([^ ]*\) .*/\1/') >/dev/null 2>&1
        declare -F _sealblock >/dev/null || exit 1
        _sealblock sealblock
        printf '%s\n' "${COMPREPLY[@]}""#;
    let quoted = format!("LINE='{line}'\n{script}");
    let mut found: Vec<String> = in_shell(place, "bash", &quoted).lines().map(str::to_owned).collect();
    found.retain(|candidate| !candidate.is_empty());
    found
}

#[test]
fn bash_completes_commands_targets_and_what_servers_serve() {
    let place = Place::new();
    place.volume("--size 1MiB", &noise(1, 1 << 20));
    place.write("vault", b"");
    let server = Server::start(&place, "v");
    assert_eq!(in_bash(&place, "sealblock ver"), ["verify"]);
    assert_eq!(in_bash(&place, "sealblock verify --re"), ["--repair", "--resume"]);
    assert_eq!(in_bash(&place, "sealblock create w --guard crc3"), ["crc32c"]);
    let all = in_bash(&place, "sealblock info ");
    assert!(["v", "vault", "mem:", "mirror:"].iter().all(|name| all.contains(&(*name).to_owned())), "{all:?}");
    assert!(!all.iter().any(|name| name.starts_with('-')), "an empty word does not become an option: {all:?}");
    // The colon ends a word in bash: what stands before it is not inserted again.
    assert_eq!(in_bash(&place, "sealblock info mirror:v,va"), ["v,vault"]);
    let uri = server.target("v");
    assert_eq!(in_bash(&place, "sealblock info nvme"), ["nvme+tcp://", &uri].map(str::to_owned));
    let behind = uri.strip_prefix("nvme+tcp:").unwrap();
    for line in ["sealblock copy d nvme+tcp://127", "sealblock copy d nvme+tcp://"] {
        assert_eq!(in_bash(&place, line), [behind.to_owned()], "{line}");
    }
    assert_eq!(in_bash(&place, "sealblock scrub start nqn"), ["nqn.2026-11.io.sealblock:v"]);
    assert!(in_bash(&place, "sealblock log debug ").contains(&server.pid().to_string()));
    server.stop().is_clean();
}

#[test]
fn a_server_that_does_not_answer_delays_no_tab() {
    let place = Place::new();
    place.run("create v --size 1MiB").succeeds();
    let server = Server::start(&place, "v");
    let pid = server.pid().to_string();
    let signal = |name: &str| assert!(Command::new("kill").args(["-s", name, &pid]).status().unwrap().success());
    signal("STOP");
    let begun = Instant::now();
    let found = in_bash(&place, "sealblock info v");
    let took = begun.elapsed();
    signal("CONT");
    assert_eq!(found, ["v"]);
    assert!(took < Duration::from_secs(3), "{took:?}");
    server.stop().is_clean();
}

#[test]
fn other_shells_complete_the_same() {
    let place = Place::new();
    place.write("vault", b"");
    match has("fish") {
        true => {
            let script = "source $SCRIPT; complete -C 'sealblock info mirror:a,va'; complete -C 'sealblock ver'";
            assert_eq!(in_shell(&place, "fish", script), "mirror:a,vault\nverify\n");
        }
        false => skipped("there is no fish here"),
    }
    match has("zsh") {
        true => {
            // The function as zle calls it, with what it would give to compadd.
            let script = r#"compadd() { [[ $1 = -S ]] && shift 2; shift; print -l -- ${(P)1} }
                source $SCRIPT
                words=(sealblock info mirror:a,va) CURRENT=3 PREFIX=mirror:a,va; _sealblock
                words=(sealblock info mu) CURRENT=3 PREFIX=mu; _sealblock
                words=(sealblock ver) CURRENT=2 PREFIX=ver; _sealblock"#;
            assert_eq!(in_shell(&place, "zsh", script), "mirror:a,vault\nmultipath:\nverify\n");
        }
        false => skipped("there is no zsh here"),
    }
}
