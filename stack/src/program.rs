//! The program that uses this library: what it is, and what it knows that lies above.

use std::fmt;
use std::path::Path;
use std::sync::{PoisonError, RwLock};

/// What a program is and knows.
#[derive(Clone, Copy)]
pub struct Program {
    /// True if it is a server: a file that it has in use is served by it, and not named twice on a command line.
    pub is_server: bool,
    /// Tells the user something beside the result of what is done.
    pub note: fn(&dyn fmt::Display),
    /// What the process of this number does with a file if it is a sealblock server, and what to try instead; `None` if it is
    /// none or does not respond.
    pub server_of: fn(u32, &Path) -> Option<(String, String)>,
}

impl Program {
    /// A server: notes are lines of its log, and it queries no server, since that could be itself.
    pub const SERVER: Program = Program { is_server: true, ..Program::UNKNOWN };

    const UNKNOWN: Program =
        Program { is_server: false, note: |what| tracing::warn!("{what}"), server_of: |_, _| None };
}

static PROGRAM: RwLock<Program> = RwLock::new(Program::UNKNOWN);

/// Says what the program is, from now on.
pub fn set_program(program: Program) {
    *PROGRAM.write().unwrap_or_else(PoisonError::into_inner) = program;
}

/// What the program is.
pub(crate) fn program() -> Program {
    *PROGRAM.read().unwrap_or_else(PoisonError::into_inner)
}

/// Tells the program's user something.
pub(crate) fn note(what: impl fmt::Display) {
    (program().note)(&what);
}
