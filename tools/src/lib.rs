//! The binary `sealblock`: its command line, what it understands, and what it answers.
//!
//! A library beside the binary, so that tests and fuzz targets reach the parsers. The modules here know no device; the
//! files under `commands` do the work, one for each subcommand.

pub mod cli;
pub mod commands;
pub mod control;
pub mod exit;
pub mod findings;
mod identity;
pub mod interrupt;
pub mod progress;
pub mod quantity;
pub mod range;
pub mod report;
pub mod stack;
pub mod tally;
pub mod target;
mod uring;
