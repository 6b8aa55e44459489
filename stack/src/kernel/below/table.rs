//! Tables of device-mapper as segments (the kernel's `Documentation/admin-guide/device-mapper`).

use sealblock_runtime_ioctl::device_mapper::Target;

use super::mapping::{Arrangement, On, Sectors, Segment};
use crate::kernel::DeviceNumber;

/// Max. members of one target.
const MAX_MEMBERS: usize = 256;

/// The segments of a table, and the devices that they name. A target that is not known here, or is not what the documentation says, is a
/// segment of an unknown arrangement.
pub(super) fn segments(table: &[Target]) -> (Vec<Segment>, Vec<DeviceNumber>) {
    let mut members = Vec::new();
    let segments = table.iter().map(|target| {
        let mut words = target.parameters.split_whitespace();
        let mut known = members.clone();
        let how = match target.kind.as_str() {
            "linear" => on(&mut words, &mut known).map(Arrangement::Linear),
            "striped" => striped(&mut words, &mut known),
            "mirror" => mirror(&mut words, &mut known),
            "zero" | "error" => Some(Arrangement::Nowhere),
            _ => None,
        };
        // Only of a target that is understood: half of one names no members.
        if how.is_some() {
            members = known;
        }
        let sectors = Sectors::new(target.start_sectors, target.length_sectors);
        Segment { sectors, how: how.unwrap_or(Arrangement::Unknown) }
    });
    (segments.collect(), members)
}

/// `MAJOR:MINOR OFFSET`
fn on<'a>(words: &mut impl Iterator<Item = &'a str>, members: &mut Vec<DeviceNumber>) -> Option<On> {
    let number: DeviceNumber = words.next()?.parse().ok()?;
    let sector = words.next()?.parse().ok()?;
    let member = members.iter().position(|known| *known == number).unwrap_or_else(|| {
        members.push(number);
        members.len() - 1
    });
    Some(On { member, sector })
}

/// `N CHUNK [DEVICE OFFSET]{N}`
fn striped<'a>(words: &mut impl Iterator<Item = &'a str>, members: &mut Vec<DeviceNumber>) -> Option<Arrangement> {
    let count = count(words)?;
    let chunk = words.next()?.parse().ok()?;
    let ons = (0..count).map(|_| on(words, members)).collect::<Option<Vec<On>>>()?;
    Some(Arrangement::Striped { chunk, members: ons })
}

/// `LOG M [PARAMETER]{M} N [DEVICE OFFSET]{N} ...`
fn mirror<'a>(words: &mut impl Iterator<Item = &'a str>, members: &mut Vec<DeviceNumber>) -> Option<Arrangement> {
    words.next()?;
    for _ in 0..count(words)? {
        words.next()?;
    }
    let ons = (0..count(words)?).map(|_| on(words, members)).collect::<Option<Vec<On>>>()?;
    Some(Arrangement::Copies(ons))
}

fn count<'a>(words: &mut impl Iterator<Item = &'a str>) -> Option<usize> {
    words.next()?.parse().ok().filter(|count| (1..=MAX_MEMBERS).contains(count))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn target(kind: &str, parameters: &str) -> Target {
        let (kind, parameters) = (kind.to_owned(), parameters.to_owned());
        Target { start_sectors: 0, length_sectors: 64, kind, parameters }
    }

    fn one(kind: &str, parameters: &str) -> (Arrangement, Vec<DeviceNumber>) {
        let (mut segments, members) = segments(&[target(kind, parameters)]);
        (segments.remove(0).how, members)
    }

    #[test]
    fn targets_are_read_as_the_kernel_prints_them() {
        let number = |major, minor| DeviceNumber { major, minor };
        let on = |member, sector| On { member, sector };
        assert_eq!(one("linear", "8:17 2048"), (Arrangement::Linear(on(0, 2048)), vec![number(8, 17)]));
        let members = vec![on(0, 0), on(1, 384)];
        assert_eq!(
            one("striped", "2 128 8:0 0 259:3 384"),
            (Arrangement::Striped { chunk: 128, members: members.clone() }, vec![number(8, 0), number(259, 3)])
        );
        let mirror = "core 3 1024 sync block_on_error 2 8:0 0 259:3 384 1 handle_errors";
        assert_eq!(one("mirror", mirror), (Arrangement::Copies(members), vec![number(8, 0), number(259, 3)]));
        assert_eq!(one("error", "").0, Arrangement::Nowhere);
        let both = [target("linear", "8:1 0"), target("linear", "8:1 100")];
        assert_eq!(segments(&both).1, [number(8, 1)], "a device is one member, however often it is named");
    }

    #[test]
    fn what_is_not_understood_is_unknown_and_names_no_members() {
        for (kind, parameters) in [
            ("thin", "252:3 1"),
            ("crypt", "aes 0 8:1 0"),
            ("linear", "8:1"),
            ("linear", "/dev/sda 0"),
            ("linear", "8:1 x"),
            ("striped", "3 128 8:0 0 8:1 0"),
            ("striped", "0 128"),
            ("striped", "999999999 128 8:0 0"),
            ("mirror", "core 99 1"),
            ("mirror", ""),
        ] {
            assert_eq!(one(kind, parameters), (Arrangement::Unknown, Vec::new()), "{kind} {parameters}");
        }
    }

    proptest! {
        #[test]
        fn no_parameters_are_a_reason_to_panic(kind in "linear|striped|mirror|zero", parameters in "[0-9: a-z-]{0,60}") {
            let (_, members) = one(&kind, &parameters);
            prop_assert!(members.len() <= MAX_MEMBERS);
        }
    }
}
