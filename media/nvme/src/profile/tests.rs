use super::*;
use sealblock_integrity::{ChecksumKind, ProtectionType};
use sealblock_protocols_nvme::identify::{Controller, IndependentNamespace, Namespace, NvmController, NvmNamespace};
use sealblock_protocols_nvme::identify::{Dps, Flbas};
use sealblock_protocols_nvme::wire::Ascii;
use sealblock_protocols_nvme::{Count8, registers};

const OVER_TCP: ProfileOptions =
    ProfileOptions { source: PiSource::Auto, metadata: MetadataSupport::Interleaved, transfer_bytes: 1 << 20 };

/// A well-behaved namespace of 1000 blocks with a 16-bit guard.
fn pages() -> IdentifyPages {
    let mut namespace = Namespace { nsze: 1000, ncap: 1000, nuse: 1000, ..Namespace::default() };
    let mut nvm = NvmNamespace::default();
    let format = PiFormat::with_default_storage_tag(GuardKind::Crc16, ProtectionType::Type1);
    let wire = NamespaceFormat {
        block_size: BlockSize::B4096,
        metadata_bytes: 8,
        extended: true,
        protection: Some((format, PiPosition::Last)),
        storage_tag_mask: 0,
    };
    wire.describe(&mut namespace, &mut nvm);
    IdentifyPages {
        capabilities: registers::Capabilities::from_bits(127),
        controller: Controller { mdts: 5, oncs: Oncs::VERIFY | Oncs::WRITE_ZEROES, ..Controller::default() },
        nvm_controller: Some(NvmController { vsl: 8, wzsl: 3, ..NvmController::default() }),
        namespace,
        nvm_namespace: Some(nvm),
        independent: None,
        ids: vec![NamespaceId::Uuid([3; 16])],
        extensions: Extensions::NONE,
        bitmap_pages: 0,
        origin: None,
        identities: Vec::new(),
        content: None,
    }
}

fn profile(change: impl FnOnce(&mut IdentifyPages)) -> Result<NamespaceProfile, NamespaceError> {
    let mut pages = pages();
    change(&mut pages);
    NamespaceProfile::of(1, &pages, &OVER_TCP)
}

/// The profile of a namespace with blocks of this size and tuples of this format.
pub(crate) fn profile_of(block_size: BlockSize, format: PiFormat, source: PiSource) -> NamespaceProfile {
    let mut pages = pages();
    let wire = NamespaceFormat {
        block_size,
        metadata_bytes: format.tuple_bytes(),
        extended: true,
        protection: Some((format, PiPosition::Last)),
        storage_tag_mask: u64::MAX,
    };
    let mut nvm = NvmNamespace::default();
    wire.describe(&mut pages.namespace, &mut nvm);
    pages.nvm_namespace = Some(nvm);
    NamespaceProfile::of(1, &pages, &ProfileOptions { source, ..OVER_TCP }).unwrap()
}

/// The profile of a namespace within which 100 blocks are copied with one command, in up to three ranges of 40.
pub(crate) fn copying(
    format: Option<PiFormat>,
    source: PiSource,
    change: impl FnOnce(&mut IdentifyPages),
) -> NamespaceProfile {
    let mut pages = pages();
    let wire = NamespaceFormat {
        block_size: BlockSize::B4096,
        metadata_bytes: format.map_or(0, PiFormat::tuple_bytes),
        extended: true,
        protection: format.map(|format| (format, PiPosition::Last)),
        storage_tag_mask: u64::MAX,
    };
    let mut nvm = NvmNamespace::default();
    wire.describe(&mut pages.namespace, &mut nvm);
    pages.nvm_namespace = Some(nvm);
    pages.controller.oncs |= Oncs::COPY;
    pages.controller.cdfs = 0b11;
    (pages.namespace.mssrl, pages.namespace.mcl, pages.namespace.msrc) = (40, 100, Count8::new(3).unwrap());
    change(&mut pages);
    NamespaceProfile::of(1, &pages, &ProfileOptions { source, ..OVER_TCP }).unwrap()
}

#[test]
fn copies_are_made_where_tags_stay_as_they_are_and_limits_are_known() {
    let tuple = |guard, kind| Some(PiFormat::with_default_storage_tag(guard, kind));
    let [type1, type2, type3] = ProtectionType::ALL.map(|kind| tuple(GuardKind::Crc16, kind));
    let wide = tuple(GuardKind::Crc64, ProtectionType::Type3);
    let of = |format, source, change: fn(&mut IdentifyPages)| {
        let profile = copying(format, source, change);
        assert_eq!(profile.abilities.is_native(RequestKind::Copy), profile.copy.is_some(), "ONCS has it");
        profile.copy.map(|plan| (plan.format.code(), plan.range_blocks.get(), plan.command_blocks.get()))
    };
    for (format, source, form) in [
        (None, PiSource::Auto, Some(0)),
        (type1, PiSource::Host, None),
        (type2, PiSource::Host, None),
        (type3, PiSource::Host, Some(0)),
        (wide, PiSource::Host, Some(1)),
        (type1, PiSource::Target, Some(0)),
        (type2, PiSource::Target, Some(0)),
    ] {
        let plan = of(format, source, |_| ());
        // 80 blocks: two whole ranges, so that no part has a fourth.
        assert_eq!(plan, form.map(|form| (form, 40, 80)), "{format:?} {source:?}");
    }
    let plain = |change| of(None, PiSource::Auto, change);
    assert_eq!(plain(|pages| pages.namespace.mcl = 30), Some((0, 30, 30)));
    assert_eq!(plain(|pages| pages.namespace.mcl = u32::MAX), Some((0, 40, 120)));
    assert_eq!(plain(|pages| pages.namespace.mcl = 0), None);
    assert_eq!(plain(|pages| pages.namespace.mssrl = 0), None);
    assert_eq!(plain(|pages| pages.controller.cdfs = 0b10), None);
    assert_eq!(of(wide, PiSource::Host, |pages| pages.controller.cdfs = 0b01), None);
    let unsaid = copying(None, PiSource::Auto, |pages| pages.controller.oncs = Oncs::VERIFY);
    assert_eq!((unsaid.abilities.get(RequestKind::Copy), unsaid.copy.is_some()), (Ability::Absent, true));
}

#[test]
fn limits_are_those_of_the_pages() {
    let profile = profile(|_| ()).unwrap();
    let limits = profile.geometry.limits;
    // 128 KiB with metadata counted, 1 MiB of Verify, 32 KiB of zeroes.
    assert_eq!(
        (limits.max_transfer_blocks.get(), limits.max_verify_blocks.get(), limits.max_zero_blocks.get()),
        (31, 256, 8)
    );
    assert_eq!(profile.identity.uuid, Some([3; 16]));
    assert!(profile.abilities.offloads && profile.abilities.writable && !profile.abilities.unmap_zeroes);
    assert_eq!(profile.abilities.get(RequestKind::Verify), Ability::Native);
    assert_eq!(profile.abilities.get(RequestKind::Compare), Ability::Absent);
}

#[test]
fn without_limits_one_command_names_what_it_can() {
    let free = profile(|pages| {
        pages.controller.mdts = 0;
        pages.nvm_controller = None;
        pages.controller.ctratt = Ctratt::LIMITS_EXCLUDE_METADATA;
    });
    let limits = free.unwrap().geometry.limits;
    assert_eq!(
        (limits.max_transfer_blocks.get(), limits.max_verify_blocks.get(), limits.max_zero_blocks.get()),
        (256, MAX_BLOCKS, MAX_BLOCKS)
    );
    let bounded = profile(|pages| {
        pages.controller.ctratt = Ctratt::LIMITS_EXCLUDE_METADATA;
        pages.namespace.noiob = 20;
    });
    assert_eq!(bounded.unwrap().geometry.limits.max_transfer_blocks.get(), 20);
}

#[test]
fn zeroes_are_promised_only_with_both_bits_of_dlfeat() {
    for (bits, promised) in [(0, false), (1, false), (8, false), (9, true), (10, false), (0x19, true)] {
        let profile = profile(|pages| pages.namespace.dlfeat = Dlfeat::from_bits_retain(bits)).unwrap();
        assert_eq!(profile.abilities.unmap_zeroes, promised, "{bits:#x}");
    }
}

#[test]
fn a_write_protected_namespace_takes_no_writes() {
    assert!(!profile(|pages| pages.namespace.nsattr = 1).unwrap().abilities.writable);
    let independent = IndependentNamespace { nsattr: 1, ..IndependentNamespace::default() };
    assert!(!profile(|pages| pages.independent = Some(independent)).unwrap().abilities.writable);
}

#[test]
fn a_cache_is_volatile_unless_either_page_says_no() {
    assert!(!profile(|_| ()).unwrap().volatile_write_cache);
    assert!(profile(|pages| pages.controller.vwc = Vwc::PRESENT).unwrap().volatile_write_cache);
    let none = IndependentNamespace { nsfeat: NO_VOLATILE_CACHE, ..IndependentNamespace::default() };
    let protected = profile(|pages| (pages.controller.vwc, pages.independent) = (Vwc::PRESENT, Some(none)));
    assert!(!protected.unwrap().volatile_write_cache);
}

#[test]
fn pages_that_lie_are_refused_with_a_reason() {
    type Change = fn(&mut IdentifyPages);
    let lies: [(Change, &str); 9] = [
        (|pages| pages.namespace.nsze = 0, "no blocks"),
        (|pages| pages.namespace.nsze = u64::MAX, "cannot be counted"),
        (|pages| pages.namespace.lbaf[0].lbads = 63, "2^63"),
        (|pages| pages.namespace.lbaf[0].lbads = 255, "2^255"),
        (|pages| pages.namespace.lbaf[0].ms = 64, "64 bytes of metadata"),
        (|pages| pages.namespace.lbaf[0].ms = 4, "4 bytes of metadata"),
        (|pages| pages.namespace.flbas.extended = false, "buffer of its own"),
        (|pages| pages.namespace.flbas = Flbas { index: 9, extended: true }, "format 9 of 1"),
        (|pages| pages.ids.push(NamespaceId::CommandSet(2)), "command set is 2"),
    ];
    for (lie, reason) in lies {
        let error = profile(lie).unwrap_err().to_string();
        assert!(error.contains(reason), "{error} does not say {reason}");
    }
    let plain_with_metadata = profile(|pages| pages.namespace.dps = Dps::NONE).unwrap_err().to_string();
    assert!(plain_with_metadata.contains("8 bytes of metadata"), "{plain_with_metadata}");
    let extended = profile(|pages| {
        pages.controller.ctratt = Ctratt::EXTENDED_LBA_FORMATS;
        pages.nvm_namespace = None;
    });
    assert!(extended.unwrap_err().to_string().contains("CNS 05h"));
}

#[test]
fn a_namespace_is_the_same_only_if_all_of_it_is() {
    let before = profile(|_| ()).unwrap();
    assert!(profile(|pages| pages.controller.cntlid = 77).unwrap().check_unchanged(&before).is_ok());
    let others: [fn(&mut IdentifyPages); 3] = [
        |pages| pages.ids = vec![NamespaceId::Uuid([4; 16])],
        |pages| pages.namespace.lbaf[0].lbads = 9,
        |pages| pages.controller.sn = Ascii::new("another"),
    ];
    for other in others {
        assert!(matches!(profile(other).unwrap().check_unchanged(&before), Err(NamespaceError::Changed { .. })));
    }
    let of = |content| profile(move |pages| pages.content = content).unwrap();
    assert!(matches!(of(Some(1)).check_unchanged(&of(Some(2))), Err(NamespaceError::Changed { .. })));
    for (now, then) in [(Some(1), Some(1)), (None, Some(1)), (Some(1), None)] {
        assert!(of(now).check_unchanged(&of(then)).is_ok(), "{now:?} after {then:?}");
    }
    let copy = profile(others[2]).unwrap().check_unchanged(&before).unwrap_err().to_string();
    assert!(copy.contains(r#"has the serial number "another" and had """#), "{copy}");
}

#[test]
fn a_namespace_that_was_resized_is_the_same_if_its_identifier_says_so() {
    let known: [fn(&mut IdentifyPages); 3] =
        [|_| (), |pages| pages.namespace.nsze = 1001, |pages| pages.namespace.nsze = 999];
    let nameless: [fn(&mut IdentifyPages); 2] =
        [|pages| pages.ids = vec![], |pages| (pages.ids, pages.namespace.nsze) = (vec![], 1001)];
    for now in known {
        assert!(profile(now).unwrap().check_unchanged(&profile(known[0]).unwrap()).is_ok());
    }
    let [before, now] = nameless.map(|pages| profile(pages).unwrap());
    assert!(
        matches!(now.check_unchanged(&before), Err(NamespaceError::Changed { what }) if what.contains("1001 blocks"))
    );
}

proptest::proptest! {
    /// No page causes a panic, and whatever is accepted has a usable geometry.
    #[test]
    fn any_pages_are_understood_or_refused(
        bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 4096),
        count in 0_u16..=256,
    ) {
        let mut pages = pages();
        pages.namespace = Namespace::decode(&bytes).unwrap();
        pages.namespace.nlbaf = Count8::saturating(count);
        pages.nvm_namespace = Some(NvmNamespace::decode(&bytes).unwrap());
        pages.nvm_controller = Some(NvmController::decode(&bytes).unwrap());
        pages.controller = Controller::decode(&bytes).unwrap();
        if let Ok(profile) = NamespaceProfile::of(1, &pages, &OVER_TCP) {
            let geometry = profile.geometry;
            proptest::prop_assert!(geometry.capacity_blocks.checked_shl(geometry.block_size.shift()).is_some());
            proptest::prop_assert!(geometry.limits.max_verify_blocks.get() <= MAX_BLOCKS);
        }
    }
}

#[test]
fn digests_and_a_reserved_area_exist_if_the_target_reports_them() {
    let abilities = |extensions, mdts| {
        let profile = profile(|pages| (pages.extensions, pages.controller.mdts) = (extensions, mdts)).unwrap();
        (profile.abilities.get(RequestKind::Checksum), profile.abilities.get(RequestKind::ReadReserved))
    };
    let both = Extensions::CHECKSUM | Extensions::RESERVED;
    assert_eq!(abilities(Extensions::NONE, 5), (Ability::Absent, Ability::Absent));
    assert_eq!(abilities(Extensions::CHECKSUM, 5), (Ability::Native, Ability::Absent));
    assert_eq!(abilities(Extensions::RESERVED, 5), (Ability::Absent, Ability::Native));
    let (crc64, both_kinds) = (Extensions::CHECKSUM, Extensions::CHECKSUM | Extensions::CHECKSUM_CRC32C);
    for (extensions, how) in [
        (Extensions::NONE, [Ability::Absent; 2]),
        (Extensions::CHECKSUM_CRC32C, [Ability::Absent; 2]),
        (crc64, [Ability::Native, Ability::Absent]),
        (both_kinds, [Ability::Native; 2]),
    ] {
        let abilities = profile(|pages| pages.extensions = extensions).unwrap().abilities;
        assert_eq!(ChecksumKind::ALL.map(|kind| abilities.of_checksum(kind)), how, "{extensions:?}");
    }
    // A slot is one transfer: 16 KiB are too few for the larger one.
    for (mdts, reserved) in [(0, Ability::Native), (3, Ability::Native), (2, Ability::Absent)] {
        assert_eq!(abilities(both, mdts), (Ability::Native, reserved), "MDTS {mdts}");
    }
}
