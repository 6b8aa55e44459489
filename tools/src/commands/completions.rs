//! `sealblock completions`: a script that completes commands and options in a shell.

use std::io::{self, Write};

use clap::CommandFactory;
use clap_complete::Shell;
use sealblock_stack::StackError;

use crate::cli::{Cli, Completions};
use crate::exit::Exit;

/// Prints the script on standard output.
pub fn run(arguments: &Completions) -> Result<Exit, StackError> {
    let mut output = io::stdout().lock();
    let written = output.write_all(&script(arguments.shell)).and_then(|()| output.flush());
    written.map_err(|error| StackError::io("printing completions", &error))?;
    Ok(Exit::Clean)
}

/// The generator panics when it cannot write, so it writes to memory, which takes all.
fn script(shell: Shell) -> Vec<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "sealblock", &mut script);
    script
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;

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
