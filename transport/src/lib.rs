//! Connections of block protocols: the part that is the same for every protocol.
//!
//! The client's side: a [`Connection`] passes requests and replies between its owners and a socket, through the
//! protocol's [`ClientCore`]. [`Reconnecting`] replaces the session to an [`Endpoint`] when one of its connections is
//! lost, and delays newer changes until older ones on the lost connection can no longer be executed.
//!
//! The server's side: [`Serving`] accepts connections, spreads them over cores and ends them; it controls each through
//! a [`ControlSignal`]. Once the devices of a connection are known, it may go to another core ([`Arrival`],
//! [`hand_to_core`]). A connection's [`SendScheduler`] lets one task receive, execute and send in batches.

mod admission;
mod arrival;
mod changes;
mod connection;
mod cores;
mod ends;
mod identities;
mod in_flight;
mod lineage;
mod monitor;
mod reconnecting;
mod serving;
mod signal;
mod turns;
mod work;

use std::hash::{BuildHasher, RandomState};

pub use arrival::{Arrival, next_part};
pub use changes::SentChange;
pub use connection::{
    ClientCore, ClientEvent, Connection, ConnectionLost, RequestError, RequestFuture, SubmitError, end_late_requests,
};
pub use ends::{Ends, WatchedEnd, poll_until};
pub use identities::ListedIdentities;
pub use lineage::{Lineage, QUIESCE};
pub use monitor::{ConnectionMonitor, LostConnection};
pub use reconnecting::{Attempt, AttemptError, Endpoint, ReconnectLimits, Reconnecting, Sending, watch_end};
pub use serving::{Registration, Serving, hand_to_core};
pub use signal::{ControlSignal, Signals};
pub use turns::{ReplyBatch, STAGING_BYTES, SendScheduler, Sender, configure_socket, lingering_close, next_poll};
pub use work::{HeldBytes, WorkQueue, work_budget};

/// 16 random bytes, different in each call, to identify a client.
pub fn random_id() -> [u8; 16] {
    let half = || RandomState::new().hash_one(std::process::id()).to_le_bytes();
    let mut id = [0; 16];
    id[..8].copy_from_slice(&half());
    id[8..].copy_from_slice(&half());
    id
}
