//! What `sealblock serve` runs: serves the targets of a plan over NVMe/TCP and NBD, and can change to another plan
//! while it runs.
//!
//! It has no command line and prints nothing for people: a program makes a [`plan::Plan`], passes it to [`run::run`],
//! and gets [`events::Event`]s. `control` has the messages of the control socket, for the server and for the commands
//! that query it; `status` has the states in them. Only the log is written here, as lines of `tracing` on standard
//! error.
//!
//! A part is a file and the folder beside it:
//!
//! - [`plan`]: what is to be served, and the configuration file for it.
//! - [`devices`]: open targets, each on its own core, and the work on them besides requests: scrubs, resizing, mirrors,
//!   retries.
//! - [`exports`]: the protocols by which they are served, and the listeners.
//! - `server`: the served state, and the change to a new plan. [`run`]: its main loop; [`run::attach`] serves one block
//!   device.
//! - [`control`], [`status`]: the control socket, and what is reported. [`events`], [`log`], [`dates`]: output for the
//!   program and for people.

pub mod dates;
pub mod devices;
pub mod events;
pub mod exports;
pub mod line_writer;
pub mod log;
pub mod plan;
pub mod run;
mod server;

/// The control socket: its messages, the client, and the server's side.
pub mod control {
    pub mod client;
    pub mod exchange;
    pub mod folder;
    pub mod peer;
    pub mod protocol;
    pub(crate) mod responder;
    pub mod socket_path;
}

/// The states that are reported.
pub mod status {
    mod assess;
    pub mod connections;
    pub mod damage;
    pub mod files;
    pub mod health;
    pub mod mirror;
    pub mod scrub;
    pub mod server;
    pub mod server_info;
}
