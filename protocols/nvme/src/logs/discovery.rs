//! Discovery: which subsystems are where (Base, "Discovery log page").

use std::net::IpAddr;

use crate::error::Invalid;
use crate::nqn::{Nqn, PaddedText};
use crate::wire::{Field, codes, layout};

codes! {
    /// TRTYPE: transports.
    pub enum TransportType: u8 {
        /// RDMA.
        Rdma = 1,
        /// Fibre Channel.
        FibreChannel = 2,
        /// TCP.
        Tcp = 3,
        /// Within one host.
        Loop = 254,
    }
}

codes! {
    /// ADRFAM: address families.
    pub enum AddressFamily: u8 {
        /// IPv4.
        Ipv4 = 1,
        /// IPv6.
        Ipv6 = 2,
        /// InfiniBand.
        InfiniBand = 3,
        /// Fibre Channel.
        FibreChannel = 4,
        /// Within one host.
        Loop = 254,
    }
}

codes! {
    /// SUBTYPE: what is found at an address.
    pub enum SubsystemType: u8 {
        /// Another discovery subsystem.
        Referral = 1,
        /// A subsystem with namespaces.
        Nvm = 2,
        /// The discovery subsystem that answers.
        CurrentDiscovery = 3,
    }
}

layout! {
    /// Head of the page; entries start at byte 1024.
    pub struct DiscoveryHeader[1024] {
        /// GENCTR: changes when the page does.
        0 => genctr: u64,
        /// NUMREC: entries.
        8 => numrec: u64,
        /// RECFMT: form of the page, 0.
        16 => recfmt: u16,
    }
}

layout! {
    /// An entry of the page, as it stands on the wire.
    pub struct DiscoveryEntry[1024] {
        /// TRTYPE: see [`TransportType`].
        0 => trtype: u8,
        /// ADRFAM: see [`AddressFamily`].
        1 => adrfam: u8,
        /// SUBTYPE: see [`SubsystemType`].
        2 => subtype: u8,
        /// TREQ: bits 1:0 secure channel (0 not specified, 1 required, 2 not required), bit 2 SQ flow control can be off.
        3 => treq: u8,
        /// PORTID: port of the subsystem.
        4 => portid: u16,
        /// CNTLID: FFFFh for the dynamic controller model.
        6 => cntlid: u16,
        /// ASQSZ: entries of the admin submission queue, at least 32.
        8 => asqsz: u16,
        /// EFLAGS: about the entry.
        10 => eflags: u16,
        /// TRSVCID: port number as text.
        32 => trsvcid: PaddedText<32>,
        /// SUBNQN: name.
        256 => subnqn: PaddedText<256>,
        /// TRADDR: address as text.
        512 => traddr: PaddedText<256>,
        /// TSAS byte 0, for TCP SECTYPE: 0 without transport security.
        768 => sectype: u8,
    }
}

impl DiscoveryEntry {
    /// A subsystem found over TCP at this address, without security, with controllers made as hosts connect.
    pub fn tcp(subtype: SubsystemType, portid: u16, address: IpAddr, port: u16, subnqn: &Nqn) -> DiscoveryEntry {
        let adrfam = if address.is_ipv4() { AddressFamily::Ipv4 } else { AddressFamily::Ipv6 };
        DiscoveryEntry {
            trtype: TransportType::Tcp.code(),
            adrfam: adrfam.code(),
            subtype: subtype.code(),
            treq: 0,
            portid,
            cntlid: crate::fabrics::CNTLID_DYNAMIC,
            asqsz: 32,
            eflags: 0,
            trsvcid: PaddedText::new(&port.to_string()),
            subnqn: PaddedText::new(subnqn.as_str()),
            traddr: PaddedText::new(&address.to_string()),
            sectype: 0,
        }
    }

    /// The name; a host that meets one that is not valid leaves the entry out.
    pub fn nqn(&self) -> Option<Nqn> {
        Nqn::from_field(self.subnqn.bytes()).ok()
    }

    /// Address and port, if the entry is one for TCP and they are numbers.
    pub fn tcp_address(&self) -> Option<(IpAddr, u16)> {
        if self.trtype != TransportType::Tcp.code() {
            return None;
        }
        Some((self.traddr.text().parse().ok()?, self.trsvcid.text().parse().ok()?))
    }
}

/// The page.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DiscoveryLog {
    /// GENCTR: changes when the page does; a host that reads it in parts compares it before and after.
    pub generation: u64,
    /// The entries.
    pub entries: Vec<DiscoveryEntry>,
}

impl DiscoveryLog {
    /// The page.
    pub fn encode(&self) -> Vec<u8> {
        let head = DiscoveryHeader { genctr: self.generation, numrec: self.entries.len() as u64, recfmt: 0 };
        let mut page = head.encode().to_vec();
        page.extend(self.entries.iter().flat_map(DiscoveryEntry::encode));
        page
    }

    /// Bytes of the whole page, from its first 1024; `None` for more than 64 bits can say.
    pub fn length_bytes(head: &DiscoveryHeader) -> Option<u64> {
        head.numrec.checked_add(1)?.checked_mul(DiscoveryHeader::BYTES as u64)
    }

    /// The page that was read; refused if its form is unknown or if it ends before its last entry.
    pub fn decode(page: &[u8]) -> Result<DiscoveryLog, Invalid> {
        let head = DiscoveryHeader::decode(page)?;
        if head.recfmt != 0 {
            return Err(Invalid::field("RECFMT", 4, 0));
        }
        let (needed_bytes, got_bytes) = (DiscoveryLog::length_bytes(&head).unwrap_or(u64::MAX), page.len() as u64);
        if got_bytes < needed_bytes {
            return Err(Invalid::DataLength { needed_bytes, got_bytes });
        }
        let entries = page[DiscoveryHeader::BYTES..needed_bytes as usize].chunks_exact(DiscoveryEntry::BYTES);
        Ok(DiscoveryLog { generation: head.genctr, entries: entries.map(DiscoveryEntry::get).collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log() -> DiscoveryLog {
        let entry = |kind, nqn: &Nqn| DiscoveryEntry::tcp(kind, 1, "127.0.0.1".parse().unwrap(), 4420, nqn);
        let nvm = entry(SubsystemType::Nvm, &"nqn.2026-11.org.sealblock:default".parse().unwrap());
        DiscoveryLog { generation: 2, entries: vec![entry(SubsystemType::CurrentDiscovery, &Nqn::discovery()), nvm] }
    }

    #[test]
    fn a_page_has_these_bytes_and_round_trips() {
        let page = log().encode();
        assert_eq!(page.len(), 3072);
        assert_eq!(page[..10], [2, 0, 0, 0, 0, 0, 0, 0, 2, 0]);
        assert_eq!(page[2048..2058], [3, 1, 2, 0, 1, 0, 0xFF, 0xFF, 32, 0]);
        assert!(page[2048 + 32..].starts_with(b"4420\0"));
        assert!(page[2048 + 256..].starts_with(b"nqn.2026-11.org.sealblock:default\0"));
        assert!(page[2048 + 512..].starts_with(b"127.0.0.1\0"));
        let read = DiscoveryLog::decode(&page).unwrap();
        assert_eq!(read, log());
        assert_eq!(read.entries[1].tcp_address(), Some(("127.0.0.1".parse().unwrap(), 4420)));
        assert_eq!(read.entries[0].nqn(), Some(Nqn::discovery()));
    }

    #[test]
    fn pages_that_lie_are_refused() {
        let page = log().encode();
        assert!(matches!(DiscoveryLog::decode(&page[..3071]), Err(Invalid::DataLength { needed_bytes: 3072, .. })));
        let mut many = page.clone();
        many[8..16].fill(0xFF);
        assert!(matches!(DiscoveryLog::decode(&many), Err(Invalid::DataLength { needed_bytes: u64::MAX, .. })));
        let mut other = page;
        other[16] = 1;
        assert!(matches!(DiscoveryLog::decode(&other), Err(Invalid::Field { field: "RECFMT", .. })));
    }

    #[test]
    fn an_entry_that_is_not_for_tcp_has_no_address() {
        let mut entry = log().entries[1];
        entry.trtype = TransportType::Rdma.code();
        assert_eq!(entry.tcp_address(), None);
        entry.trtype = TransportType::Tcp.code();
        entry.trsvcid = PaddedText::new("http");
        assert_eq!(entry.tcp_address(), None);
    }
}
