//! What `sealblock serve` runs: serves the targets of a plan over NVMe/TCP and NBD, and changes what it serves while it runs.
//!
//! It knows no command line and prints nothing for people: a program makes a [`plan::Plan`], hands it to [`run::run`], and gets
//! [`events::Event`]s. The control socket's messages are those of `control`, for the server and for the commands that ask it; the
//! states that they carry are those of `status`. Only the log is written here, by lines of `tracing` to standard error.

pub mod attach;
pub mod config;
pub mod dates;
pub mod events;
pub mod log;
pub mod mirrors;
pub mod plan;
pub mod resize;
pub mod run;

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

mod bad_runs;
pub mod block_device;
mod block_devices;
mod devices;
mod inspect;
pub mod listeners;
mod members;
mod nbd;
mod observer;
mod offered;
mod scrub;
mod served;
mod server;
pub mod service;
mod waiting;
