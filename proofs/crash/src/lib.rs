//! A worker process changes a volume in a file and reports each change; SIGKILL ends it at a random moment; then every
//! block is read and checked against the report.
//!
//! The report goes through a pipe, which outlives the worker. The worker reports a change before it starts and after it
//! completes, so the report is never behind the volume: data reported as flushed must be in the volume, and data in the
//! volume must have been reported as started.

pub mod history;
pub mod pattern;
pub mod report;
pub mod rounds;
pub mod worker;
