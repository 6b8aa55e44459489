//! Connections of block protocols, whatever the protocol.
//!
//! The client's side: a [`Connection`] moves requests and replies between its owners and a socket, by way of the
//! protocol's [`ClientCore`]; [`Reconnecting`] replaces the session to an [`Endpoint`] when one of its connections is lost.

mod connection;
mod in_flight;
mod reconnecting;

pub use connection::{
    ClientCore, ClientEvent, Connection, ConnectionLost, RequestError, RequestFuture, SubmitError, end_late_requests,
};
pub use reconnecting::{Attempt, AttemptError, Endpoint, ReconnectLimits, Reconnecting};
