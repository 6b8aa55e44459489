//! What was found of a volume in shards, as of one volume: the worst of its shards.

use crate::format::Container;
use crate::medium::identity::Standing;
use crate::medium::lost_copies::LostCopies;
use crate::medium::superblocks::SuperblockCopy;
use crate::volume::{AnsweredChanges, VolumeInfo};

/// Describes a volume in shards by what was found of each shard, with its number. Numbers are sums, blocks and offsets
/// are those of the whole volume and its medium, and what is said of one shard is the worst.
///
/// # Panics
/// Without a shard.
pub fn summarise(container: &Container, copies: &[SuperblockCopy], numbered: &[(u32, VolumeInfo)]) -> VolumeInfo {
    let (_, first) = numbered.first().expect("a volume has at least one shard");
    let shards = || numbered.iter().map(|(_, info)| info);
    let offsets = |shard: u32, info: &VolumeInfo| -> Vec<SuperblockCopy> {
        let start = container.window(shard).offset;
        let moved = |copy: &SuperblockCopy| SuperblockCopy { offset_bytes: start + copy.offset_bytes, ..copy.clone() };
        info.superblocks.iter().map(moved).collect()
    };
    let unreadable = numbered
        .iter()
        .flat_map(|(shard, info)| info.unreadable.iter().map(|place| container.block_at(*shard, *place)));
    let mut unreadable: Vec<_> = unreadable.collect();
    unreadable.sort_unstable();
    let of_shards = numbered.iter().flat_map(|(shard, info)| offsets(*shard, info));
    let is_certain = |info: &&VolumeInfo| info.standing != Standing::Certain;
    VolumeInfo {
        uuid: container.uuid(),
        write_seq: shards().map(|info| info.write_seq).max().unwrap_or(0),
        is_clean: shards().all(|info| info.is_clean),
        layout: *container.shard_layout(),
        container: Some(*container),
        recovered: shards().map(|info| info.recovered).sum(),
        dropped: shards().map(|info| info.dropped).sum(),
        unreadable,
        log_lost: shards().map(|info| info.log_lost).sum(),
        lost_copies: LostCopies::of_all(shards().map(|info| info.lost_copies.clone()).collect()),
        is_read_only: first.is_read_only,
        standing: shards().find(is_certain).unwrap_or(first).standing,
        answered: shards().map(|info| info.answered.clone()).reduce(worse).unwrap_or(AnsweredChanges::AllDurable),
        superblocks: copies.iter().cloned().chain(of_shards).collect(),
    }
}

fn worse(one: AnsweredChanges, other: AnsweredChanges) -> AnsweredChanges {
    use AnsweredChanges::{AllDurable, MayBeLost, Noted};
    match (one, other) {
        (MayBeLost(why), _) | (_, MayBeLost(why)) => MayBeLost(why),
        (Noted(one), Noted(other)) => Noted(one + other),
        (Noted(changes), AllDurable) | (AllDurable, Noted(changes)) => Noted(changes),
        (AllDurable, AllDurable) => AllDurable,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::WhyLost;

    #[test]
    fn of_completed_changes_the_worst_is_told() {
        use AnsweredChanges::{AllDurable, MayBeLost, Noted};
        let lost = || MayBeLost(WhyLost::OtherBoot);
        assert_eq!(worse(AllDurable, AllDurable), AllDurable);
        assert_eq!(worse(AllDurable, Noted(2)), Noted(2));
        assert_eq!(worse(Noted(1), Noted(2)), Noted(3));
        assert_eq!(worse(Noted(1), lost()), lost());
        assert_eq!(worse(lost(), AllDurable), lost());
    }
}
