//! Where a peer listens: hosts, ports and Unix sockets.

use std::fmt;
use std::net::Ipv6Addr;
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::str::FromStr;

use super::error::{MAX_TEXT_BYTES, TargetError, TargetErrorKind};
use super::piece::{Fail, Piece, digits, encode, located};

/// The port that IANA gave to NVMe/TCP I/O controllers.
pub const NVME_TCP_PORT: u16 = 4420;
/// The port that IANA gave to NBD.
pub const NBD_PORT: u16 = 10809;

/// Longest host name, in bytes (RFC 1035, section 2.3.4, as text without the last dot).
const MAX_HOST_BYTES: usize = 253;
/// Who listens.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Host {
    /// A name, or an IPv4 address in dots, as it was written.
    Name(String),
    /// An IPv6 address, written in brackets.
    Ipv6(Ipv6Addr),
}

/// Where a peer listens.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Address {
    /// On which host.
    pub host: Host,
    /// On which port; the protocol's usual one unless given.
    pub port: Option<NonZeroU16>,
}

impl Address {
    /// The host as it is looked up: without brackets.
    pub fn host_name(&self) -> String {
        match &self.host {
            Host::Name(name) => name.clone(),
            Host::Ipv6(address) => address.to_string(),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Name(name) => f.write_str(name)?,
            Host::Ipv6(address) => write!(f, "[{address}]")?,
        }
        self.port.map_or(Ok(()), |port| write!(f, ":{port}"))
    }
}

/// Where an NBD server listens.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum NbdAddress {
    /// On a host.
    Tcp(Address),
    /// At the path of a Unix socket.
    Unix(PathBuf),
}

impl NbdAddress {
    /// The URI of an export there (NBD URI specification, `nbd:` and `nbd+unix:`).
    pub fn uri(&self, export: &str) -> String {
        let export = encode(export, ":/");
        match self {
            NbdAddress::Tcp(address) => format!("nbd://{address}/{export}"),
            NbdAddress::Unix(path) => {
                format!("nbd+unix:///{export}?socket={}", encode(&path.to_string_lossy(), "/:"))
            }
        }
    }
}

impl fmt::Display for NbdAddress {
    /// As `discover` takes it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NbdAddress::Tcp(address) => write!(f, "nbd://{address}"),
            NbdAddress::Unix(_) => f.write_str(&self.uri("")),
        }
    }
}

impl FromStr for Address {
    type Err = TargetError;

    /// Reads `HOST[:PORT]` and nothing else.
    fn from_str(text: &str) -> Result<Address, TargetError> {
        let whole = Piece { text, at: 0 };
        let read = match text.find('/') {
            _ if text.len() > MAX_TEXT_BYTES => Piece { text, at: MAX_TEXT_BYTES }.fail(TargetErrorKind::TooLong),
            Some(at) => Err(Fail { at, problem: TargetErrorKind::UriPart('/') }),
            None => address(whole).map(|(address, _)| address),
        };
        read.map_err(|fail| located(text, fail))
    }
}

/// Splits off host and port. The rest is what follows the slash behind them, and empty when there is none.
pub(super) fn address(piece: Piece<'_>) -> Result<(Address, Piece<'_>), Fail> {
    if let Some(at) = piece.text.find(['?', '#', '@']) {
        let part = piece.text[at..].chars().next().unwrap_or('?');
        return Err(Fail { at: piece.at + at, problem: TargetErrorKind::UriPart(part) });
    }
    let end = Piece { text: "", at: piece.at + piece.text.len() };
    let (authority, path) = piece.split_once('/').unwrap_or((piece, end));
    let (host, port) = host(authority)?;
    let port = port.map(|port| match digits(port.text).and_then(|text| text.parse().ok()) {
        Some(port) => Ok(port),
        None => port.fail(TargetErrorKind::Port(port.text.to_owned())),
    });
    Ok((Address { host, port: port.transpose()? }, path))
}

fn host(piece: Piece<'_>) -> Result<(Host, Option<Piece<'_>>), Fail> {
    let bad = |host: Piece<'_>| host.fail(TargetErrorKind::Host(host.text.to_owned()));
    if !piece.text.starts_with('[') {
        let (host, port) = match piece.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (piece, None),
        };
        return match host.text {
            "" => host.fail(TargetErrorKind::NoHost),
            // An IPv6 address without its brackets has more than one colon.
            _ if port.is_some_and(|port| port.text.contains(':')) => bad(piece),
            name if is_host_name(name) => Ok((Host::Name(name.to_owned()), port)),
            _ => bad(host),
        };
    }
    let Some((address, rest)) = piece.split_once(']') else { return piece.fail(TargetErrorKind::Unclosed) };
    let Ok(ipv6) = address.text[1..].parse() else { return bad(piece) };
    match rest.split_once(':') {
        _ if rest.text.is_empty() => Ok((Host::Ipv6(ipv6), None)),
        Some((nothing, port)) if nothing.text.is_empty() => Ok((Host::Ipv6(ipv6), Some(port))),
        _ => bad(piece),
    }
}

fn is_host_name(name: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    name.len() <= MAX_HOST_BYTES && name.bytes().all(fits)
}
