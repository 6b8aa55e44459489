//! How commands reach a server on this machine: its control socket.
//!
//! A server listens on a Unix socket that only its own user can reach (`place.rs`). A command asks every socket that it finds
//! for the target it means (`client.rs`), in lines of JSON (`protocol.rs`), as drawn in `docs/formats/json.md`.

pub mod client;
pub mod mirror_status;
pub mod protocol;
pub mod server;
pub mod socket_path;
pub mod status;
