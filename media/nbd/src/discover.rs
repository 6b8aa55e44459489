//! What a server exports.

use sealblock_protocols_nbd::client::{Event, Goal};

use crate::session::SessionConfig;
use crate::{Address, ConnectError, Options};

pub use sealblock_protocols_nbd::client::ListedExport;

/// The exports that a server names, in its order. Of the options only [`Options::connect_timeout`] counts.
///
/// # Errors
/// As [`ConnectError`] says. Servers may refuse to name what they export, and clients can open it all the same.
///
/// # Panics
/// Outside a reactor.
pub async fn discover(address: Address, options: Options) -> Result<Vec<ListedExport>, ConnectError> {
    let plan = SessionConfig { address, export: String::new(), options };
    plan.in_time(async {
        match plan.negotiate(Goal::List).await? {
            (_, Event::Listed(exports)) => Ok(exports),
            _ => Err(plan.lost("the negotiation came to something else")),
        }
    })
    .await
}
