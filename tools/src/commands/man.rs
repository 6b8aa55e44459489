//! `sealblock man`: the manual pages, one for the program and one for each command.

use std::fs;
use std::path::Path;

use clap::CommandFactory;

use crate::cli::{Cli, Man};
use crate::exit::{Exit, Failure};

/// Writes the pages into the folder, which is made if it is not there.
pub fn run(arguments: &Man) -> Result<Exit, Failure> {
    let dir = arguments.dir.as_path();
    write(dir).map_err(|error| Failure::io("writing manual pages", &error).on(dir.display()))?;
    Ok(Exit::Clean)
}

fn write(dir: &Path) -> std::io::Result<()> {
    fs::create_dir_all(dir)?;
    clap_mangen::generate_to(Cli::command().disable_help_subcommand(true), dir)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit::Cause;

    #[test]
    fn there_is_a_page_for_each_command() {
        let dir = std::env::temp_dir().join(format!("sealblock-man-{}", std::process::id()));
        assert_eq!(run(&Man { dir: dir.clone() }), Ok(Exit::Clean));
        for command in Cli::command().get_subcommands() {
            let page = fs::read_to_string(dir.join(format!("sealblock-{}.1", command.get_name()))).unwrap();
            assert!(page.contains("Example"), "{page}");
        }
        assert!(fs::read_to_string(dir.join("sealblock.1")).unwrap().contains("Exit status"));
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_folder_that_cannot_be_is_named() {
        let failure = run(&Man { dir: "/dev/null/pages".into() }).unwrap_err();
        assert_eq!(failure.cause().status(), 3);
        assert_eq!(failure.cause(), Cause::Io);
        assert!(failure.to_string().starts_with("sealblock: writing manual pages on /dev/null/pages: "), "{failure}");
    }
}
