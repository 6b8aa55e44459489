//! What `sealblock serve` runs: serves the targets of a plan over NVMe/TCP and NBD, and changes what it serves while it runs.
//!
//! It knows no command line and prints nothing for people: a program makes a [`plan::Plan`], hands it to [`run::run`], and gets
//! [`events::Event`]s. The control socket's messages are those of `control`, for the server and for the commands that ask it; the
//! states that they carry are those of `status`. Only the log is written here, by lines of `tracing` to standard error.
//!
//! A room is a file and the folder beside it:
//!
//! - [`plan`]: what is to be served, and the configuration file that says so.
//! - [`devices`]: open targets, each on its own core, with what is done to them beside requests: scrubs, resizing, mirrors, retries.
//! - [`exports`]: by which protocols they are offered, and where is listened.
//! - `server`: the served state, and the change to a new plan. [`run`]: its main loop; [`run::attach`] serves one block device.
//! - [`control`], [`status`]: the control socket, and what is reported. [`events`], [`log`], [`dates`]: for the program and people.

pub mod dates;
pub mod devices;
pub mod events;
pub mod exports;
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
    pub mod damage;
    pub mod files;
    pub mod health;
    pub mod mirror;
    pub mod scrub;
    pub mod server;
    pub mod server_info;
}
