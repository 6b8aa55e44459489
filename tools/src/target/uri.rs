//! The two URI forms: NVMe/TCP and NBD.
//!
//! Only the parts that these have: a host, a port, a path and a query. User names, fragments and options that are not known are
//! refused, not skipped: they would ask for something that does not happen.

use std::fmt;
use std::net::Ipv6Addr;
use std::num::{NonZeroU16, NonZeroU32};
use std::path::PathBuf;

use std::str::FromStr;

use super::error::{TargetError, TargetErrorKind};
use super::parse::{Fail, Piece, located};
use super::{MAX_TEXT_BYTES, TargetName, remote};

/// Longest NVMe Qualified Name, in bytes (NVM Express Base Specification, "NVMe Qualified Names").
const MAX_NQN_BYTES: usize = 223;
/// Longest export name, in bytes (NBD protocol, "Values": strings have at most 4096 bytes).
const MAX_EXPORT_BYTES: usize = 4096;
/// Longest host name, in bytes (RFC 1035, section 2.3.4, as text without the last dot).
const MAX_HOST_BYTES: usize = 253;
/// The namespace identifier that means all namespaces, and so names none.
const BROADCAST_NSID: u32 = u32::MAX;

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

/// Whether the text may be the name of a subsystem or a host. Not every such text is one; who connects looks closer.
pub(super) fn is_nqn(text: &str) -> bool {
    text.len() <= MAX_NQN_BYTES && text.starts_with("nqn.") && !text.chars().any(char::is_control)
}

/// Reads `HOST[:PORT]/NQN[/NSID][?OPTIONS]`.
pub(super) fn nvme_tcp(piece: Piece<'_>) -> Result<TargetName, Fail> {
    let (piece, options) = match piece.split_once('?') {
        Some((piece, options)) => (piece, remote::options(options)?),
        None => (piece, remote::RemoteOptions::default()),
    };
    let (address, path) = address(piece)?;
    let (nqn, nsid) = match path.split_once('/') {
        Some((nqn, nsid)) => (nqn, Some(nsid)),
        None => (path, None),
    };
    if nqn.text.is_empty() {
        return nqn.fail(TargetErrorKind::NoNqn);
    }
    let name = decode(nqn)?;
    if !is_nqn(&name) {
        return nqn.fail(TargetErrorKind::Nqn(name));
    }
    // A trailing slash names no namespace and is ignored.
    let nsid = nsid.filter(|nsid| !nsid.text.is_empty()).map(namespace).transpose()?;
    Ok(TargetName::NvmeTcp { address, nqn: name, nsid, options })
}

fn namespace(piece: Piece<'_>) -> Result<NonZeroU32, Fail> {
    let number = digits(piece.text).and_then(|text| text.parse::<NonZeroU32>().ok());
    match number.filter(|nsid| nsid.get() != BROADCAST_NSID) {
        Some(nsid) => Ok(nsid),
        None => piece.fail(TargetErrorKind::Nsid(piece.text.to_owned())),
    }
}

/// Reads `HOST[:PORT][/EXPORT][?connections=N]`. All between the first slash and the question mark is the name.
pub(super) fn nbd(piece: Piece<'_>) -> Result<TargetName, Fail> {
    let (piece, connections) = match piece.split_once('?') {
        Some((piece, option)) => (piece, Some(connections(option)?)),
        None => (piece, None),
    };
    let (address, path) = address(piece)?;
    let export = export_name(path)?;
    Ok(TargetName::Nbd { address: NbdAddress::Tcp(address), export, connections })
}

/// Reads `/[EXPORT]?socket=PATH[&connections=N]`, in any order of the options.
pub(super) fn nbd_unix(piece: Piece<'_>) -> Result<TargetName, Fail> {
    if let Some(at) = piece.text.find('#') {
        return Err(Fail { at: piece.at + at, problem: TargetErrorKind::UriPart('#') });
    }
    let end = Piece { text: "", at: piece.at + piece.text.len() };
    let (path, query) = piece.split_once('?').unwrap_or((piece, end));
    let export = match path.text.strip_prefix('/') {
        Some(text) => Piece { text, at: path.at + 1 },
        None => return path.fail(TargetErrorKind::SocketHost),
    };
    let name = export_name(export)?;
    let (mut socket, mut number) = (None, None);
    let mut options = Some(query).filter(|query| !query.text.is_empty());
    while let Some(rest) = options {
        let option;
        (option, options) = match rest.split_once('&') {
            Some((option, rest)) => (option, Some(rest)),
            None => (rest, None),
        };
        let is_new = match option.text.strip_prefix("socket=") {
            Some(text) => {
                let path = decode(Piece { text, at: option.at + "socket=".len() })?;
                if path.is_empty() || path.contains('\0') {
                    return option.fail(TargetErrorKind::NoSocket);
                }
                socket.replace(PathBuf::from(path)).is_none()
            }
            None => number.replace(connections(option)?).is_none(),
        };
        if !is_new {
            return option.fail(TargetErrorKind::OptionTwice(option.text.to_owned()));
        }
    }
    match socket {
        Some(path) => Ok(TargetName::Nbd { address: NbdAddress::Unix(path), export: name, connections: number }),
        None => query.fail(TargetErrorKind::NoSocket),
    }
}

fn export_name(piece: Piece<'_>) -> Result<String, Fail> {
    let export = decode(piece)?;
    if export.len() > MAX_EXPORT_BYTES || export.contains('\0') {
        return piece.fail(TargetErrorKind::Export);
    }
    Ok(export)
}

fn connections(option: Piece<'_>) -> Result<NonZeroU16, Fail> {
    let number = option.text.strip_prefix("connections=").and_then(digits).and_then(|number| number.parse().ok());
    number.map_or_else(|| option.fail(TargetErrorKind::NbdOption(option.text.to_owned())), Ok)
}

/// Splits off host and port. The rest is what follows the slash behind them, and empty when there is none.
fn address(piece: Piece<'_>) -> Result<(Address, Piece<'_>), Fail> {
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

/// The text if it is made of digits; Rust's own numbers also take a sign.
fn digits(text: &str) -> Option<&str> {
    (!text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())).then_some(text)
}

/// The text with `%` and two digits as the byte they stand for.
pub(super) fn decode(piece: Piece<'_>) -> Result<String, Fail> {
    let mut bytes = Vec::with_capacity(piece.text.len());
    let mut rest = piece.text.as_bytes();
    while let [first, behind @ ..] = rest {
        rest = behind;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let [high, low, behind @ ..] = rest else { return percent(piece, rest.len() + 1) };
        let (Some(high), Some(low)) = (hex(*high), hex(*low)) else { return percent(piece, rest.len() + 1) };
        bytes.push(high << 4 | low);
        rest = behind;
    }
    String::from_utf8(bytes).or_else(|_| percent(piece, piece.text.len()))
}

fn hex(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).and_then(|value| u8::try_from(value).ok())
}

/// A bad escape, this many bytes before the end of the piece.
fn percent<T>(piece: Piece<'_>, before_end_bytes: usize) -> Result<T, Fail> {
    Err(Fail { at: piece.at + piece.text.len().saturating_sub(before_end_bytes), problem: TargetErrorKind::Percent })
}

/// The text with everything escaped but letters, digits, `-`, `.`, `_`, `~` and what `keep` names.
pub fn encode(text: &str, keep: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) || keep.as_bytes().contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}
