//! The binary `sealblock`: its command line, what it understands, and what it answers.
//!
//! A library beside the binary, so that tests reach the commands. The files under `commands` do the work, one for each
//! subcommand.

pub mod cli;
pub mod commands;
pub mod exit;
pub mod findings;
pub mod interrupt;
pub mod progress;
pub mod report;
pub mod tally;
