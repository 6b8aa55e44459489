//! The two URI forms: NVMe/TCP and NBD.
//!
//! Only the parts that these have: a host, a port, a path and a query. User names, fragments and options that are not known are
//! refused, not skipped: they would ask for something that does not happen.

use std::num::{NonZeroU16, NonZeroU32};
use std::path::PathBuf;

use super::TargetName;
use super::address::{NbdAddress, address};
use super::error::TargetErrorKind;
use super::options::{RemoteOptions, is_nqn, options};
use super::piece::{Fail, Piece, decode, digits};

/// Longest export name, in bytes (NBD protocol, "Values": strings have at most 4096 bytes).
const MAX_EXPORT_BYTES: usize = 4096;
/// The namespace identifier that means all namespaces, and so names none.
const BROADCAST_NSID: u32 = u32::MAX;

/// Reads `HOST[:PORT]/NQN[/NSID][?OPTIONS]`.
pub(super) fn nvme_tcp(piece: Piece<'_>) -> Result<TargetName, Fail> {
    let (piece, options) = match piece.split_once('?') {
        Some((piece, query)) => (piece, options(query)?),
        None => (piece, RemoteOptions::default()),
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
    for option in query.split('&').filter(|_| !query.text.is_empty()) {
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
