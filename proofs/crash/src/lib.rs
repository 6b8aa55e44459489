//! Proof by killing: a worker process changes a volume in a file and reports what it does; a SIGKILL ends it at a drawn
//! moment; then every block is read and held against the report.
//!
//! The worker's report goes through a pipe, which outlives it. It tells what it is about to do before it does it, and what
//! was answered after, so the report never knows less than the volume: what was reported as flushed must be there, and what
//! is there must have been announced.

pub mod draw;
pub mod history;
pub mod pattern;
pub mod report;
pub mod rounds;
pub mod worker;
