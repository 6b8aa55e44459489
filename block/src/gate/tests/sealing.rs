//! Data without tags: sealed by the gate or by the device, once, with the tags of their addresses.

use sealblock_integrity::{GuardKind, PiFormat, ProtectionType, Tags, Unsealed};
use sealblock_runtime_memory::Slice;
use sealblock_units::BlockSize;

use super::fake_device::{FakeDevice, TYPE1, extent, numbered, run};
use super::{data, done, failure, read};
use crate::RequestKind::Write;
use crate::{Abilities, Ability, Device, Durability, ErrorKind, Request};

/// A write of numbered blocks without tags.
fn unsealed(start: u64, blocks: u64, format: Option<PiFormat>) -> Request {
    let bytes: Vec<u8> = (start..start + blocks).flat_map(|block| [block as u8 + 1; 512]).collect();
    let tags = Tags { initial_ref_tag: start, ..Tags::default() };
    let data = Unsealed::new(Slice::copy_from(&bytes), BlockSize::B512, format, tags);
    Request::write(extent(start, blocks), data, Durability::Volatile)
}

fn device(blocks: u32, seals_writes: Ability) -> FakeDevice {
    let mut device = FakeDevice::limited(Some(TYPE1), blocks);
    device.abilities = Abilities::BASIC.with([Write], seals_writes);
    device
}

#[test]
fn data_are_sealed_in_front_of_a_device_that_does_not_and_only_there() {
    for (ability, seen, shown) in [(Ability::Absent, 0, Ability::Emulated), (Ability::Native, 4, Ability::Native)] {
        let gate = device(8, ability).gate();
        assert_eq!(gate.abilities().get(Write), shown);
        done(run(gate.execute(unsealed(5, 20, Some(TYPE1)))));
        let pieces = [(Write, 5, 3, None), (Write, 8, 8, None), (Write, 16, 8, None), (Write, 24, 1, None)];
        assert_eq!(gate.device().take_seen(), pieces);
        assert_eq!(gate.device().unsealed.get(), seen, "pieces without tags");
        let stored = data(run(gate.execute(read(5, 20))));
        assert_eq!(
            stored.first_difference(&numbered(5, 20, Some(TYPE1)), true),
            None,
            "each has the tag of its address"
        );
    }
}

#[test]
fn data_with_tags_stay_as_they_are_on_a_device_that_seals() {
    let gate = device(64, Ability::Native).gate();
    let tagged = numbered(9, 2, Some(TYPE1));
    done(run(gate.execute(Request::write(extent(9, 2), tagged.clone(), Durability::Volatile))));
    assert_eq!(gate.device().unsealed.get(), 0);
    assert_eq!(data(run(gate.execute(read(9, 2)))).first_difference(&tagged, true), None);
}

/// If the gate sealed them for a device that then has to wait, they would be sealed again.
#[test]
fn only_a_device_that_seals_gets_them_in_place() {
    for (ability, is_done) in [(Ability::Absent, false), (Ability::Emulated, false), (Ability::Native, true)] {
        let mut device = device(64, ability);
        device.instant = true;
        let gate = device.gate();
        assert_eq!(gate.try_execute(&unsealed(3, 2, Some(TYPE1))).is_some(), is_done);
        assert_eq!(gate.device().take_seen().len(), usize::from(is_done));
    }
}

#[test]
fn they_are_refused_for_the_same_reasons_as_data_with_tags() {
    for ability in [Ability::Absent, Ability::Native] {
        let gate = device(64, ability).gate();
        let type3 = PiFormat::with_default_storage_tag(GuardKind::Crc16, ProtectionType::Type3);
        for format in [None, Some(type3)] {
            let refused = failure(run(gate.execute(unsealed(0, 1, format))));
            assert!(matches!(refused, ErrorKind::Limit { what: "protection information of another format", .. }));
        }
        let short = Request { extents: extent(0, 3).into(), ..unsealed(0, 2, Some(TYPE1)) };
        let refused = failure(run(gate.execute(short)));
        assert_eq!(refused, ErrorKind::Limit { what: "blocks of data", limit: 3, actual: 2 });
        assert!(matches!(failure(run(gate.execute(unsealed(63, 2, Some(TYPE1))))), ErrorKind::Range { .. }));
        let mut fixed = device(64, ability);
        fixed.abilities.writable = false;
        let fixed = fixed.gate();
        assert_eq!(failure(run(fixed.execute(unsealed(0, 1, Some(TYPE1))))), ErrorKind::ReadOnly);
        assert_eq!((gate.device().take_seen(), fixed.device().take_seen()), (vec![], vec![]));
    }
}
