//! Which connections are served: a limit for all, and a share for each address.
//!
//! Invariants: the connections that count never exceed the limit. One address has at most the part [`MOST_OF_ONE`] of
//! the limit, so some of it always remains for others. Once half of the limit is taken, one address may have at most a
//! quarter of it in connections that have not introduced themselves. At the limit, a connection from an address without
//! connections replaces the oldest one that has not introduced itself.
//!
//! Shape: a pure function of the list of connections, called once for each accepted connection. Connections on Unix
//! sockets have no address and no share: the permissions of the socket decide who may connect.

use std::net::IpAddr;
use std::net::Ipv6Addr;

/// The largest part of the limit for one address: three quarters.
const MOST_OF_ONE: (usize, usize) = (3, 4);
/// One address may have the limit divided by this number in connections that have not introduced themselves.
const SILENT_PART: usize = 4;
/// Connections that have not introduced themselves are restricted only once the limit divided by this number is taken.
const BUSY_PART: usize = 2;

/// A served connection, with what the decision about the next one depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Admitted {
    /// Its number; older connections have lower numbers.
    pub(crate) number: u64,
    /// The address of its peer.
    pub(crate) from: Option<IpAddr>,
    /// True if it has introduced itself: by a successful Connect, or by choosing an export.
    pub(crate) is_introduced: bool,
}

/// The decision about a new connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Admission {
    /// It is served.
    Admit,
    /// It is served instead of this connection, which is ended.
    InPlaceOf(u64),
    /// It is closed.
    Refuse,
}

/// The address under which a connection is counted: for an IPv4 host its address, also if it connects over IPv6; for an
/// IPv6 host its 64-bit network, in which it can have any number of addresses.
pub(crate) fn origin(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => address.into(),
        IpAddr::V6(address) => Ipv6Addr::from(u128::from(address) >> 64 << 64).into(),
    }
}

/// Decides about a connection from this origin.
pub(crate) fn decide(admitted: &[Admitted], limit: usize, from: Option<IpAddr>) -> Admission {
    let count = |wanted: &dyn Fn(&&Admitted) -> bool| admitted.iter().filter(wanted).count();
    let own = from.map_or(0, |from| count(&|other| other.from == Some(from)));
    let silent = from.map_or(0, |from| count(&|other| other.from == Some(from) && !other.is_introduced));
    // A small limit is not divided into shares.
    let (most, most_silent) = (share(limit, MOST_OF_ONE), share(limit, (1, SILENT_PART)));
    let is_busy = admitted.len() >= limit.div_ceil(BUSY_PART);
    if own >= most || is_busy && silent >= most_silent {
        return Admission::Refuse;
    }
    if admitted.len() < limit {
        return Admission::Admit;
    }
    let oldest =
        admitted.iter().filter(|other| other.from.is_some() && !other.is_introduced).min_by_key(|other| other.number);
    match oldest {
        Some(oldest) if own == 0 && from.is_some() => Admission::InPlaceOf(oldest.number),
        _ => Admission::Refuse,
    }
}

/// This part of the limit; a small limit is not divided.
fn share(limit: usize, (part, of): (usize, usize)) -> usize {
    const FEW: usize = 16;
    if limit < FEW { limit } else { limit * part / of }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: usize = 40;

    fn address(last: u8) -> Option<IpAddr> {
        Some(IpAddr::from([192, 0, 2, last]))
    }

    fn many(count: usize, from: Option<IpAddr>, is_introduced: bool) -> Vec<Admitted> {
        (0..count as u64).map(|number| Admitted { number, from, is_introduced }).collect()
    }

    /// As many connections from one address as are served before one is refused.
    fn crowd(from: Option<IpAddr>, is_introduced: bool) -> Vec<Admitted> {
        let mut admitted = Vec::new();
        while decide(&admitted, LIMIT, from) == Admission::Admit {
            admitted.push(Admitted { number: admitted.len() as u64, from, is_introduced });
        }
        admitted
    }

    #[test]
    fn one_address_leaves_room_for_others_whatever_its_connections_do() {
        assert_eq!((crowd(address(1), false).len(), crowd(address(1), true).len()), (20, 30));
        assert_eq!(crowd(None, false).len(), LIMIT, "a Unix socket");
        for is_introduced in [false, true] {
            let admitted = crowd(address(1), is_introduced);
            assert_eq!(decide(&admitted, LIMIT, address(2)), Admission::Admit);
        }
        assert_eq!(decide(&many(7, address(1), false), 8, address(1)), Admission::Admit, "a limit of a few");
    }

    #[test]
    fn silent_connections_make_room_for_an_address_without_any() {
        let mut admitted = many(LIMIT - 1, None, true);
        admitted.push(Admitted { number: 77, from: address(1), is_introduced: false });
        assert_eq!(decide(&admitted, LIMIT, address(2)), Admission::InPlaceOf(77));
        assert_eq!(decide(&admitted, LIMIT, address(1)), Admission::Refuse, "it has one");
        assert_eq!(decide(&admitted, LIMIT, None), Admission::Refuse);
        admitted[LIMIT - 1].is_introduced = true;
        assert_eq!(decide(&admitted, LIMIT, address(2)), Admission::Refuse, "all are in use");
    }

    #[test]
    fn an_origin_is_an_ipv4_address_or_a_network_of_ipv6() {
        let of = |text: &str| origin(text.parse().unwrap());
        assert_eq!(of("2001:db8:1:2:3:4:5:6"), of("2001:db8:1:2:ffff::1"));
        assert_ne!(of("2001:db8:1:2::1"), of("2001:db8:1:3::1"));
        assert_eq!(of("::ffff:192.0.2.9"), of("192.0.2.9"));
        assert_ne!(of("192.0.2.8"), of("192.0.2.9"));
    }
}
