//! Connections of block protocols, whatever the protocol.
//!
//! The client's side: a [`Connection`] moves requests and replies between its owners and a socket, by way of the
//! protocol's [`ClientCore`]; [`Reconnecting`] replaces the session to an [`Endpoint`] when one of its connections is lost.
//!
//! The server's side: [`Serving`] accepts connections, spreads them over cores and ends them, by way of a [`ControlSignal`] to
//! each; a connection's [`Turns`] let one task receive, execute and send in batches.

mod connection;
mod in_flight;
mod reconnecting;
mod serving;
mod signal;
mod turns;

pub use connection::{
    ClientCore, ClientEvent, Connection, ConnectionLost, RequestError, RequestFuture, SubmitError, end_late_requests,
};
pub use reconnecting::{Attempt, AttemptError, Endpoint, ReconnectLimits, Reconnecting};
pub use serving::{Registration, Serving};
pub use signal::{ControlSignal, Signals};
pub use turns::{Batch, STAGING_BYTES, Sender, Turns, configure_socket, lingering_close, next_turn};
