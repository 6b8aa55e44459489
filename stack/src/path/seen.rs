//! The bytes of a device at the places where formats keep their magic numbers.
//!
//! A place that cannot be read has zeroes, and a bad block there hides nothing beside it. All places together are less than 1 MiB, wherever
//! they lie on the device: nothing is searched.

use std::ops::Range;

use futures_util::future::join_all;

/// Places begin and end at multiples of this, which is one of the sectors of every device.
const PAGE_BYTES: u64 = 4096;

/// Bytes of a device that were looked at.
pub(crate) struct Seen {
    len_bytes: u64,
    /// In order and apart from each other, each with its offset.
    places: Vec<(u64, Vec<u8>)>,
}

impl Seen {
    /// Reads places of a device of so many bytes, all at once. `read` takes an offset and a length in multiples of `unit_bytes`, the smallest
    /// part of the device that is read, and has no bytes where the device fails.
    pub async fn read(
        (len_bytes, unit_bytes): (u64, u64),
        places: Vec<Range<u64>>,
        read: impl AsyncFn(u64, u64) -> Option<Vec<u8>>,
    ) -> Seen {
        let read_place = async |place: Range<u64>| {
            if let Some(bytes) = read(place.start, place.end - place.start).await {
                return (place.start, bytes);
            }
            let mut bytes = Vec::new();
            for at in place.clone().step_by(unit_bytes as usize) {
                let length = unit_bytes.min(place.end - at);
                bytes.extend(read(at, length).await.unwrap_or_else(|| vec![0; length as usize]));
            }
            (place.start, bytes)
        };
        let places = join_all(apart(places, len_bytes).into_iter().map(read_place)).await;
        Seen { len_bytes, places }
    }

    /// The bytes of the device.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// So many bytes from an offset on, if all of them were looked at.
    pub fn bytes(&self, offset: u64, length: usize) -> Option<&[u8]> {
        let behind = self.places.partition_point(|(at, _)| *at <= offset);
        let (at, place) = self.places.get(behind.checked_sub(1)?)?;
        place.get((offset - at) as usize..)?.get(..length)
    }

    /// Whether the device has these bytes there.
    pub fn has(&self, offset: u64, magic: &[u8]) -> bool {
        self.bytes(offset, magic.len()) == Some(magic)
    }
}

/// Places of a device in whole pages, in order, without overlaps, as far as the device reaches.
pub(crate) fn apart(mut places: Vec<Range<u64>>, len_bytes: u64) -> Vec<Range<u64>> {
    places.sort_by_key(|place| place.start);
    let mut joined: Vec<Range<u64>> = Vec::new();
    for place in places {
        let start = place.start - place.start % PAGE_BYTES;
        let end = place.end.checked_next_multiple_of(PAGE_BYTES).unwrap_or(len_bytes).min(len_bytes);
        match joined.last_mut() {
            Some(last) if start <= last.end => last.end = last.end.max(end),
            _ if start < end => joined.push(start..end),
            _ => {}
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn places_are_whole_pages_of_the_device_and_read_once() {
        let places = vec![9000..9001, 0..4096, 100..200, 5000..6000, 20_000..20_600, 1 << 40..1 << 41];
        assert_eq!(apart(places, 21_000), [0..12_288, 16_384..21_000]);
        assert_eq!(apart(vec![0..512, 4096..4097], 512), vec![0..512]);
        assert!(apart(vec![0..1, 4096..4097], 0).is_empty());
    }

    #[test]
    fn a_bad_block_is_zeroes_and_hides_nothing_beside_it() {
        let read = async |at: u64, length: u64| {
            let has_bad = (at..at + length).contains(&512);
            (!has_bad).then(|| vec![7; length as usize])
        };
        let seen = Seen::read((1 << 20, 512), vec![0..4096, 8192..8193], read).now_or_never().unwrap();
        assert!(seen.has(0, &[7; 512]) && seen.has(512, &[0; 512]) && seen.has(1024, &[7; 3072]));
        assert!(seen.has(8192, &[7; 4096]));
        // What was not looked at has nothing, be it in part.
        assert!(seen.bytes(4095, 2).is_none() && seen.bytes(4096, 1).is_none() && seen.bytes(1 << 30, 1).is_none());
        assert_eq!(seen.len_bytes(), 1 << 20);
    }
}
