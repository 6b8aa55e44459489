//! Opens exports over NBD, and translates failures to connect.

use std::num::NonZeroU16;

use sealblock_media_nbd::{Address as Peer, ConnectError, NbdDevice, Options};

use super::remote::host_of;
use crate::exit::{Cause, CliError};
use crate::target::NbdAddress;

/// The port of NBD (IANA).
const PORT: u16 = 10809;

/// Opens an export.
pub async fn connect(
    address: &NbdAddress,
    export: &str,
    connections: Option<NonZeroU16>,
) -> Result<NbdDevice, CliError> {
    let wanted = connections.map_or(Options::default().connections, Into::into);
    let options = Options { connections: wanted, ..Options::default() };
    let opened = NbdDevice::connect(peer(address), export, options).await;
    opened.map_err(|error| of_connect("connecting", &error, address))
}

/// Names and descriptions of what a server exports.
pub async fn exports(address: &NbdAddress) -> Result<Vec<(String, String)>, CliError> {
    let found = sealblock_media_nbd::discover(peer(address), Options::default()).await;
    let found = found.map_err(|error| of_connect("discovering", &error, address).on(address))?;
    Ok(found.into_iter().map(|listed| (listed.name, listed.description)).collect())
}

fn peer(address: &NbdAddress) -> Peer {
    match address {
        NbdAddress::Tcp(address) => Peer::new(host_of(address), address.port.map_or(PORT, Into::into)),
        NbdAddress::Unix(path) => Peer::Unix(path.clone()),
    }
}

/// A failure to connect as a failure of a command.
fn of_connect(doing: &str, error: &ConnectError, address: &NbdAddress) -> CliError {
    let check = match address {
        NbdAddress::Tcp(_) => "check that the server runs, and its address and port",
        NbdAddress::Unix(_) => "check that the server runs, the path of its socket, and that this user may open it",
    };
    let failure = |cause| CliError::new(cause, doing, error);
    match error {
        ConnectError::Resolve { .. } => failure(Cause::Unreachable).advise("the name or address of a host"),
        ConnectError::Connect { .. } | ConnectError::Timeout { .. } | ConnectError::Lost { .. } => {
            failure(Cause::Unreachable).advise(check)
        }
        ConnectError::Refused(_) if doing == "discovering" => failure(Cause::Refused),
        ConnectError::Refused(_) if error.is_transient() => {
            let quote = if matches!(address, NbdAddress::Unix(_)) { "'" } else { "" };
            failure(Cause::Refused).advise(format!("`sealblock discover {quote}{address}{quote}` names what there is"))
        }
        ConnectError::Refused(_) => failure(Cause::Refused),
        ConnectError::Violation(_) => failure(Cause::Unsuitable).advise("where an NBD server listens"),
        ConnectError::Name => failure(Cause::Usage),
        ConnectError::Unsupported(_) | ConnectError::Changed { .. } => failure(Cause::Unsuitable),
    }
}
