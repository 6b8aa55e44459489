//! Asymmetric Namespace Access: how well this controller reaches which namespaces (Base, clause of the same name).

use crate::error::Invalid;
use crate::wire::{Field, codes, layout};

codes! {
    /// How well a controller reaches the namespaces of a group.
    pub enum AnaState: u8 {
        /// Optimized.
        Optimized = 0x1,
        /// Non-optimized.
        NonOptimized = 0x2,
        /// Inaccessible.
        Inaccessible = 0x3,
        /// Persistent loss.
        PersistentLoss = 0x4,
        /// Change.
        Change = 0xF,
    }
}

/// A group of namespaces that share a state.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AnaGroup {
    /// AGID: the group, 1 to ANAGRPMAX.
    pub id: u32,
    /// Change count of the group.
    pub change_count: u64,
    /// State.
    pub state: AnaState,
    /// The namespaces, ascending.
    pub namespaces: Vec<u32>,
}

/// The page.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct AnaLog {
    /// Change count of the page.
    pub change_count: u64,
    /// The groups, ascending.
    pub groups: Vec<AnaGroup>,
}

layout! {
    /// Head of the page.
    pub struct AnaHead[16] {
        /// Change count.
        0 => change_count: u64,
        /// Number of ANA group descriptors.
        8 => groups: u16,
    }
}

layout! {
    /// Head of a group; its namespaces follow.
    pub struct GroupHead[32] {
        /// AGID.
        0 => id: u32,
        /// Number of namespaces.
        4 => namespaces: u32,
        /// Change count.
        8 => change_count: u64,
        /// State in bits 3:0.
        16 => state: u8,
    }
}

impl AnaLog {
    /// RGO, bit 0 of LSP: the host wants the groups without their namespaces.
    pub const GROUPS_ONLY: u8 = 1;

    /// The page. With `groups_only` the namespaces are left out.
    pub fn encode(&self, groups_only: bool) -> Vec<u8> {
        let head = AnaHead { change_count: self.change_count, groups: self.groups.len() as u16 };
        let mut page = head.encode().to_vec();
        for group in &self.groups {
            let namespaces: &[u32] = if groups_only { &[] } else { &group.namespaces };
            let (id, change_count, state) = (group.id, group.change_count, group.state.code());
            page.extend(GroupHead { id, namespaces: namespaces.len() as u32, change_count, state }.encode());
            page.extend(namespaces.iter().flat_map(|nsid| nsid.to_le_bytes()));
        }
        page
    }

    /// The page that was read; refused if it ends before its last group, or if a state is unknown.
    pub fn decode(page: &[u8]) -> Result<AnaLog, Invalid> {
        let head = AnaHead::decode(page)?;
        let mut rest = &page[AnaHead::BYTES..];
        let mut groups = Vec::new();
        for _ in 0..head.groups {
            let group = GroupHead::decode(rest)?;
            rest = &rest[GroupHead::BYTES..];
            let (needed_bytes, got_bytes) = (u64::from(group.namespaces) * 4, rest.len() as u64);
            let short = Invalid::DataLength { needed_bytes, got_bytes };
            let (list, behind) =
                usize::try_from(needed_bytes).ok().and_then(|bytes| rest.split_at_checked(bytes)).ok_or(short)?;
            let state = AnaState::from_code(group.state & 0xF).ok_or(Invalid::field("ANA state", 0, 0))?;
            let namespaces = list.chunks_exact(4).map(u32::get).collect();
            groups.push(AnaGroup { id: group.id, change_count: group.change_count, state, namespaces });
            rest = behind;
        }
        Ok(AnaLog { change_count: head.change_count, groups })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log() -> AnaLog {
        let group = |id, namespaces| AnaGroup { id, change_count: 5, state: AnaState::Optimized, namespaces };
        AnaLog { change_count: 7, groups: vec![group(1, vec![1, 2]), group(2, vec![])] }
    }

    #[test]
    fn a_page_has_these_bytes_and_round_trips() {
        let page = log().encode(false);
        assert_eq!(page.len(), 16 + 40 + 32);
        assert_eq!(page[..10], [7, 0, 0, 0, 0, 0, 0, 0, 2, 0]);
        assert_eq!(page[16..33], [1, 0, 0, 0, 2, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 1]);
        assert_eq!(page[48..56], [1, 0, 0, 0, 2, 0, 0, 0]);
        assert_eq!(AnaLog::decode(&page), Ok(log()));
        assert_eq!(log().encode(true).len(), 16 + 64);
    }

    #[test]
    fn pages_that_lie_are_refused() {
        let mut page = log().encode(false);
        assert!(AnaLog::decode(&page[..page.len() - 1]).is_err());
        page[20..24].fill(0xFF);
        assert!(matches!(AnaLog::decode(&page), Err(Invalid::DataLength { .. })));
        let mut page = log().encode(false);
        page[32] = 7;
        assert!(matches!(AnaLog::decode(&page), Err(Invalid::Field { .. })));
    }
}
