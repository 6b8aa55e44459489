//! The lists that Identify returns: namespaces (CNS 02h, 07h, 10h), what identifies one (CNS 03h), command sets (1Ch).

/// Bytes of every structure that Identify returns.
const PAGE_BYTES: usize = 4096;
/// Namespace identifiers that one list has room for.
const MAX_NAMESPACES: usize = PAGE_BYTES / 4;

/// A globally unique identifier of a namespace (Base, "Namespace Identification Descriptor").
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum NamespaceId {
    /// NIDT 1h: IEEE Extended Unique Identifier.
    Eui64([u8; 8]),
    /// NIDT 2h: namespace globally unique identifier.
    Nguid([u8; 16]),
    /// NIDT 3h: UUID.
    Uuid([u8; 16]),
    /// NIDT 4h: command set; 0 is NVM.
    CommandSet(u8),
}

/// The list of the namespaces behind `after`, ascending, as many as have room. `namespaces` must ascend. `None` for
/// the two largest identifiers, which the clause answers with Invalid Namespace or Format.
pub fn namespace_list(namespaces: impl IntoIterator<Item = u32>, after: u32) -> Option<[u8; PAGE_BYTES]> {
    if after >= 0xFFFF_FFFE {
        return None;
    }
    let mut page = [0; PAGE_BYTES];
    let behind = namespaces.into_iter().filter(|&nsid| nsid > after);
    for (entry, nsid) in page.chunks_exact_mut(4).zip(behind) {
        entry.copy_from_slice(&nsid.to_le_bytes());
    }
    Some(page)
}

/// The namespaces in a list, up to its first 0. `bytes` beyond a whole list are not looked at. A list that does not
/// ascend is cut there, so that a host which requests the next part always reaches the end.
pub fn parse_namespace_list(bytes: &[u8]) -> impl Iterator<Item = u32> {
    let mut last = 0;
    bytes
        .chunks_exact(4)
        .take(MAX_NAMESPACES)
        .map(|entry| u32::from_le_bytes(entry.try_into().expect("a chunk of four bytes has four bytes")))
        .take_while(move |&nsid| {
            let ascends = nsid > last;
            last = nsid;
            ascends
        })
}

impl NamespaceId {
    /// NIDT, and the identifier.
    fn parts(&self) -> (u8, &[u8]) {
        match self {
            NamespaceId::Eui64(id) => (1, id),
            NamespaceId::Nguid(id) => (2, id),
            NamespaceId::Uuid(id) => (3, id),
            NamespaceId::CommandSet(csi) => (4, std::slice::from_ref(csi)),
        }
    }

    /// The list of these descriptors, as many as have room.
    pub fn list(ids: &[NamespaceId]) -> [u8; PAGE_BYTES] {
        let mut page = [0; PAGE_BYTES];
        let mut rest = page.as_mut_slice();
        for id in ids {
            let (nidt, bytes) = id.parts();
            let Some((entry, behind)) = rest.split_at_mut_checked(4 + bytes.len()) else { break };
            entry[..2].copy_from_slice(&[nidt, bytes.len() as u8]);
            entry[4..].copy_from_slice(bytes);
            rest = behind;
        }
        page
    }
}

/// The descriptors in a list. Those of an unknown type or a wrong length are left out; a length of 0, or one that goes
/// past the end, ends the list.
pub fn namespace_ids(bytes: &[u8]) -> Vec<NamespaceId> {
    let mut ids = Vec::new();
    let mut rest = &bytes[..bytes.len().min(PAGE_BYTES)];
    while let [nidt, nidl, _, _, behind @ ..] = rest
        && *nidl != 0
    {
        let Some((id, next)) = behind.split_at_checked(usize::from(*nidl)) else { break };
        match nidt {
            1 => ids.extend(id.try_into().ok().map(NamespaceId::Eui64)),
            2 => ids.extend(id.try_into().ok().map(NamespaceId::Nguid)),
            3 => ids.extend(id.try_into().ok().map(NamespaceId::Uuid)),
            4 => ids.extend(<[u8; 1]>::try_from(id).ok().map(|[csi]| NamespaceId::CommandSet(csi))),
            _ => {}
        }
        rest = next;
    }
    ids
}

/// Identify CNS 1Ch for a controller with the NVM command set and no other: one combination, in the first of 512
/// (Base, "Identify I/O Command Set data structure").
pub fn command_sets() -> [u8; PAGE_BYTES] {
    let mut page = [0; PAGE_BYTES];
    page[0] = 1;
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_starts_behind_the_namespace_asked_for() {
        let page = namespace_list(1..=3, 1).unwrap();
        assert_eq!(page[..12], [2, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(parse_namespace_list(&page).collect::<Vec<_>>(), [2, 3]);
        let full = namespace_list(1..=5000, 0).unwrap();
        assert_eq!(parse_namespace_list(&full).last(), Some(1024));
        for after in [0xFFFF_FFFE, 0xFFFF_FFFF] {
            assert_eq!(namespace_list([1], after), None);
        }
        assert!(namespace_list([1], 0xFFFF_FFFD).is_some());
    }

    #[test]
    fn a_list_that_does_not_ascend_ends_there() {
        let bytes: Vec<u8> = [5_u32, 6, 6, 7].iter().flat_map(|nsid| nsid.to_le_bytes()).collect();
        assert_eq!(parse_namespace_list(&bytes).collect::<Vec<_>>(), [5, 6]);
        assert_eq!(parse_namespace_list(&bytes[..7]).collect::<Vec<_>>(), [5]);
    }

    #[test]
    fn descriptors_have_these_bytes_and_round_trip() {
        let ids = [
            NamespaceId::Eui64([1; 8]),
            NamespaceId::Nguid([2; 16]),
            NamespaceId::Uuid([3; 16]),
            NamespaceId::CommandSet(0),
        ];
        let page = NamespaceId::list(&ids);
        assert_eq!(page[..16], [1, 8, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 16, 0, 0]);
        assert_eq!(page[52..58], [4, 1, 0, 0, 0, 0]);
        assert_eq!(namespace_ids(&page), ids);
        assert_eq!(namespace_ids(&NamespaceId::list(&[ids[1]; 1000])).len(), 204);
    }

    #[test]
    fn hostile_descriptors_end_the_list_or_are_left_out() {
        assert_eq!(namespace_ids(&[3, 16, 0, 0, 1, 2]), []);
        assert_eq!(namespace_ids(&[3, 1, 0, 0, 9, 4, 1, 0, 0, 2]), [NamespaceId::CommandSet(2)]);
        assert_eq!(namespace_ids(&[9, 255]), []);
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_come_to_an_end(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..5000)) {
            let _ = namespace_ids(&bytes);
            let _ = parse_namespace_list(&bytes).count();
        }
    }
}
