//! What namespaces and controllers say of themselves, and what a host understands.

use proptest::prelude::*;
use sealblock_integrity::{FormatError, GuardKind, Interleave, PiFormat, PiPosition, ProtectionType};
use sealblock_units::BlockSize;

use super::*;
use crate::wire::{Count8, Field};

fn format(guard: Option<GuardKind>, position: PiPosition) -> NamespaceFormat {
    let protection = guard.map(|guard| (PiFormat::with_default_storage_tag(guard, ProtectionType::Type1), position));
    NamespaceFormat {
        block_size: BlockSize::B4096,
        metadata_bytes: guard.map_or(0, GuardKind::tuple_bytes),
        extended: guard.is_some(),
        protection,
        storage_tag_mask: 0xFFFF,
    }
}

#[test]
fn a_format_survives_both_pages() {
    for guard in [None, Some(GuardKind::Crc16), Some(GuardKind::Crc32c), Some(GuardKind::Crc64)] {
        for position in [PiPosition::First, PiPosition::Last] {
            let (mut namespace, mut nvm) = (Namespace::default(), NvmNamespace::default());
            let format = format(guard, position);
            format.describe(&mut namespace, &mut nvm);
            let namespace = Namespace::decode(&namespace.encode()).unwrap();
            let nvm = NvmNamespace::decode(&nvm.encode()).unwrap();
            assert_eq!(NamespaceFormat::resolve(&namespace, Some(&nvm)), Ok(format));
        }
    }
}

#[test]
fn without_the_second_page_the_guard_is_the_16_bit_one() {
    let (mut namespace, mut nvm) = (Namespace::default(), NvmNamespace::default());
    let crc16 = NamespaceFormat { storage_tag_mask: 0, ..format(Some(GuardKind::Crc16), PiPosition::Last) };
    crc16.describe(&mut namespace, &mut nvm);
    assert_eq!(NamespaceFormat::resolve(&namespace, None), Ok(crc16));
}

#[test]
fn formats_that_cannot_be_are_refused_for_their_reason() {
    let (mut namespace, mut nvm) = (Namespace::default(), NvmNamespace::default());
    format(Some(GuardKind::Crc64), PiPosition::Last).describe(&mut namespace, &mut nvm);
    let resolve =
        |namespace: &Namespace, nvm: &NvmNamespace| NamespaceFormat::resolve(namespace, Some(nvm)).unwrap_err();
    for lbads in [0, 10, 13, 64, 255] {
        let mut odd = namespace;
        odd.lbaf[0].lbads = lbads;
        assert_eq!(resolve(&odd, &nvm), NamespaceFormatError::BlockSize { lbads });
    }
    let mut odd = namespace;
    odd.dps = Dps::get(&[5]);
    assert_eq!(resolve(&odd, &nvm), NamespaceFormatError::ProtectionType { pit: 5 });
    let mut odd = namespace;
    odd.lbaf[0].ms = 8;
    let small = FormatError::MetadataTooSmall { metadata_bytes: 8, tuple_bytes: 16 };
    assert_eq!(resolve(&odd, &nvm), NamespaceFormatError::Format(small));
    let mut odd = nvm;
    odd.elbaf[0] = ElbaFormat { sts: 0, pif: 3, qpif: 9 };
    assert_eq!(resolve(&namespace, &odd), NamespaceFormatError::Guard { pif: 3, qpif: 9 });
    odd.elbaf[0] = ElbaFormat { sts: 49, pif: 2, qpif: 0 };
    assert!(matches!(
        resolve(&namespace, &odd),
        NamespaceFormatError::Format(FormatError::StorageTagBits { bits: 49, .. })
    ));
}

#[test]
fn small_fields_have_their_bits() {
    let byte = |flbas: Flbas| {
        let mut to = [0];
        flbas.put(&mut to);
        to[0]
    };
    assert_eq!(byte(Flbas { index: 0x3A, extended: false }), 0x6A);
    assert_eq!(byte(Flbas { index: 1, extended: true }), 0x11);
    assert_eq!(Flbas::get(&[0x7F]), Flbas { index: 63, extended: true });
    assert_eq!(Dps::new(ProtectionType::Type3, PiPosition::First).bits(), 0x0B);
    let mut elbaf = [0; 4];
    ElbaFormat { sts: 16, pif: 1, qpif: 2 }.put(&mut elbaf);
    assert_eq!(u32::from_le_bytes(elbaf), 16 | 1 << 7 | 2 << 9);
    let dlfeat = Dlfeat::READS_ZEROES | Dlfeat::WRITE_ZEROES_DEALLOCATE;
    assert_eq!((dlfeat.bits(), dlfeat.reads_zeroes(), Dlfeat::READS_ONES.reads_zeroes()), (9, true, false));
}

#[test]
fn the_upper_index_bits_count_only_with_more_than_16_formats() {
    let mut namespace = Namespace { flbas: Flbas { index: 0x21, extended: false }, ..Namespace::default() };
    namespace.nlbaf = Count8::new(16).unwrap();
    assert_eq!(namespace.format_index(), 1);
    namespace.nulbaf = 40;
    assert_eq!(namespace.format_index(), 0x21);
}

#[test]
fn limits_are_powers_of_pages() {
    let controller = Controller { mdts: 5, ioccsz: 4 + 512, ..Controller::default() };
    assert_eq!(controller.max_transfer_bytes(4096), Some(131_072));
    assert_eq!(controller.in_capsule_bytes(), 8192);
    assert_eq!(Controller { ioccsz: 1, icdoff: 9, ..controller }.in_capsule_bytes(), 0);
    assert_eq!(
        [0, 1, 51, 52, 63, 64, 255].map(|n| limit_bytes(n, 4096)),
        [None, Some(8192), Some(1 << 63), None, None, None, None]
    );
}

/// Field tables of the specifications, as offset and size; the offsets were compared with those that a C compiler gives
/// the structures of libnvme.
#[test]
fn fields_stand_where_the_tables_draw_them() {
    let at = |fields: &[crate::wire::FieldAt], name: &str| {
        let field = fields.iter().find(|field| field.name == name).unwrap_or_else(|| panic!("no field {name}"));
        (field.offset_bytes, field.size_bytes)
    };
    for (name, offset, size) in CONTROLLER {
        assert_eq!(at(Controller::FIELDS, name), (*offset, *size), "{name}");
    }
    for (name, offset, size) in NAMESPACE {
        assert_eq!(at(Namespace::FIELDS, name), (*offset, *size), "{name}");
    }
    for (name, offset, size) in OTHERS {
        let fields = [IndependentNamespace::FIELDS, NvmController::FIELDS, NvmNamespace::FIELDS];
        let (page, name) = name.split_at(1);
        let page: usize = page.parse().unwrap();
        assert_eq!(at(fields[page], name), (*offset, *size), "{name}");
    }
}

// Mnemonic, offset in bytes, size in bytes.
#[rustfmt::skip]
const CONTROLLER: &[(&str, usize, usize)] = &[
    ("vid", 0, 2), ("ssvid", 2, 2), ("sn", 4, 20), ("mn", 24, 40), ("fr", 64, 8), ("rab", 72, 1), ("ieee", 73, 3),
    ("cmic", 76, 1), ("mdts", 77, 1), ("cntlid", 78, 2), ("ver", 80, 4), ("rtd3r", 84, 4), ("rtd3e", 88, 4),
    ("oaes", 92, 4), ("ctratt", 96, 4), ("cntrltype", 111, 1), ("fguid", 112, 16), ("crdt1", 128, 2),
    ("crdt2", 130, 2), ("crdt3", 132, 2), ("oacs", 256, 2), ("acl", 258, 1), ("aerl", 259, 1), ("frmw", 260, 1),
    ("lpa", 261, 1), ("elpe", 262, 1), ("npss", 263, 1), ("avscc", 264, 1), ("apsta", 265, 1), ("wctemp", 266, 2),
    ("cctemp", 268, 2), ("tnvmcap", 280, 16), ("unvmcap", 296, 16), ("kas", 320, 2), ("anatt", 342, 1),
    ("anacap", 343, 1), ("anagrpmax", 344, 4), ("nanagrpid", 348, 4), ("domainid", 356, 2), ("sqes", 512, 1),
    ("cqes", 513, 1), ("maxcmd", 514, 2), ("nn", 516, 4), ("oncs", 520, 2), ("fuses", 522, 2), ("fna", 524, 1),
    ("vwc", 525, 1), ("awun", 526, 2), ("awupf", 528, 2), ("icsvscc", 530, 1), ("nwpc", 531, 1), ("acwu", 532, 2),
    ("cdfs", 534, 2), ("sgls", 536, 4), ("mnan", 540, 4), ("maxdna", 544, 16), ("maxcna", 560, 4),
    ("subnqn", 768, 256), ("ioccsz", 1792, 4), ("iorcsz", 1796, 4), ("icdoff", 1800, 2), ("fcatt", 1802, 1),
    ("msdbd", 1803, 1), ("ofcs", 1804, 2), ("dctype", 1806, 1), ("psd0_mp", 2048, 2),
];

#[rustfmt::skip]
const NAMESPACE: &[(&str, usize, usize)] = &[
    ("nsze", 0, 8), ("ncap", 8, 8), ("nuse", 16, 8), ("nsfeat", 24, 1), ("nlbaf", 25, 1), ("flbas", 26, 1),
    ("mc", 27, 1), ("dpc", 28, 1), ("dps", 29, 1), ("nmic", 30, 1), ("rescap", 31, 1), ("fpi", 32, 1),
    ("dlfeat", 33, 1), ("nawun", 34, 2), ("nawupf", 36, 2), ("nacwu", 38, 2), ("nabsn", 40, 2), ("nabo", 42, 2),
    ("nabspf", 44, 2), ("noiob", 46, 2), ("nvmcap", 48, 16), ("npwg", 64, 2), ("npwa", 66, 2), ("npdg", 68, 2),
    ("npda", 70, 2), ("nows", 72, 2), ("mssrl", 74, 2), ("mcl", 76, 4), ("msrc", 80, 1), ("kpios", 81, 1),
    ("nulbaf", 82, 1), ("anagrpid", 92, 4), ("nsattr", 99, 1), ("nvmsetid", 100, 2), ("endgid", 102, 2),
    ("nguid", 104, 16), ("eui64", 120, 8), ("lbaf", 128, 256),
];

// The first digit tells the page: 0 independent namespace, 1 NVM controller, 2 NVM namespace.
#[rustfmt::skip]
const OTHERS: &[(&str, usize, usize)] = &[
    ("0nsfeat", 0, 1), ("0nmic", 1, 1), ("0rescap", 2, 1), ("0fpi", 3, 1), ("0anagrpid", 4, 4), ("0nsattr", 8, 1),
    ("0nvmsetid", 10, 2), ("0endgid", 12, 2), ("0nstat", 14, 1), ("0kpios", 15, 1), ("0maxkt", 16, 2),
    ("0rgrpid", 20, 4), ("1vsl", 0, 1), ("1wzsl", 1, 1), ("1wusl", 2, 1), ("1dmrl", 3, 1), ("1dmrsl", 4, 4),
    ("1dmsl", 8, 8), ("1kpiocap", 16, 1), ("1wzdsl", 17, 1), ("1aocs", 18, 2), ("1ver", 20, 4), ("2lbstm", 0, 8),
    ("2pic", 8, 1), ("2pifa", 9, 1), ("2elbaf", 12, 256), ("2npdgl", 268, 4), ("2nprg", 272, 4), ("2npra", 276, 4),
    ("2nors", 280, 4), ("2npdal", 284, 4), ("2lbapss", 288, 4), ("2tlbaag", 292, 4),
];

proptest! {
    #[test]
    fn any_pages_are_understood_or_refused(bytes in proptest::collection::vec(any::<u8>(), 4096), cut in 0..4096_usize) {
        let namespace = Namespace::decode(&bytes).unwrap();
        let nvm = NvmNamespace::decode(&bytes[..]).unwrap();
        let _ = NamespaceFormat::resolve(&namespace, Some(&nvm));
        prop_assert_eq!(Namespace::decode(&namespace.encode()), Ok(namespace));
        prop_assert_eq!(NvmNamespace::decode(&nvm.encode()), Ok(nvm));
        let controller = Controller::decode(&bytes).unwrap();
        prop_assert_eq!(Controller::decode(&controller.encode()), Ok(controller));
        let _ = (controller.max_transfer_bytes(4096), controller.in_capsule_bytes(), controller.sn.text());
        prop_assert!(Controller::decode(&bytes[..cut]).is_err());
    }

    #[test]
    fn formats_that_resolve_have_room_for_their_tuples(ms: u16, sts in 0..128_u8, pif in 0..4_u8, pit in 1..4_u8) {
        let mut namespace = Namespace { dps: Dps::get(&[pit]), ..Namespace::default() };
        namespace.lbaf[0] = LbaFormat { ms, lbads: 12, rp: 0 };
        let mut nvm = NvmNamespace::default();
        nvm.elbaf[0] = ElbaFormat { sts, pif, qpif: 0 };
        if let Ok(found) = NamespaceFormat::resolve(&namespace, Some(&nvm)) {
            let (format, position) = found.protection.unwrap();
            prop_assert!(Interleave::new(format, found.block_size, found.metadata_bytes, position).is_ok());
            prop_assert_eq!(format.storage_tag_bits(), sts);
        }
    }
}
