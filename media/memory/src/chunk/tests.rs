//! Tests of chunks of sixteen blocks of a byte, with tags of a byte.

use super::*;

const SHAPE: Shape = Shape { block_shift: 0, chunk_shift: 4, tuple_bytes: 1 };

fn spares() -> Spares {
    let mut spares = Spares::new(16, 16);
    top_up(&mut spares);
    spares
}

fn top_up(spares: &mut Spares) {
    spares.data.top_up(|fresh| fresh.push(Buffer::zeroed(16)));
    spares.tags.top_up(|fresh| fresh.push(Buffer::copy_from(&[0xFF; 16])));
}

fn write(chunk: &mut Chunk, blocks: Range<usize>, byte: u8, spares: &mut Spares) {
    top_up(spares);
    let mut change = chunk.begin(SHAPE, &blocks, spares);
    change.data[blocks.clone()].fill(byte);
    change.tags[blocks].fill(byte + 100);
    chunk.finish(change);
}

fn clear(chunk: &mut Chunk, blocks: Range<usize>, spares: &mut Spares) {
    top_up(spares);
    let gone = chunk.clear(SHAPE, &blocks, spares, false);
    spares.give(gone);
}

fn contents(chunk: &Chunk) -> ([u8; 16], [u8; 16]) {
    let (mut data, mut tags) = ([9; 16], [9; 16]);
    chunk.read(SHAPE, &(0..16), &mut data, &mut tags);
    (data, tags)
}

#[test]
fn parts_end_at_the_edges_of_chunks() {
    let part = |chunk, within, of_whole| Part { chunk, within, of_whole };
    let parts: Vec<Part> = SHAPE.parts(14, 20).collect();
    assert_eq!(parts, [part(0, 14..16, 0..2), part(1, 0..16, 2..18), part(2, 0..2, 18..20)]);
    assert_eq!(SHAPE.parts(5, 0).count(), 0);
    assert_eq!(SHAPE.parts(u64::MAX - 3, 4).collect::<Vec<_>>(), [part(u64::MAX >> 4, 12..16, 0..4)]);
}

#[test]
fn what_is_missing_is_zeroes_with_tags_of_ones() {
    let (mut chunk, mut spares) = (Chunk::default(), spares());
    assert_eq!((contents(&chunk), chunk.stored_bytes(SHAPE)), (([0; 16], [0xFF; 16]), 0));
    write(&mut chunk, 3..5, 7, &mut spares);
    let (data, tags) = contents(&chunk);
    assert_eq!((data[2..6].to_vec(), tags[2..6].to_vec()), (vec![0, 7, 7, 0], vec![0xFF, 107, 107, 0xFF]));
    assert_eq!(chunk.stored_bytes(SHAPE), 32);
}

#[test]
fn memory_comes_back_when_nothing_is_left() {
    let (mut chunk, mut spares) = (Chunk::default(), spares());
    write(&mut chunk, 0..16, 1, &mut spares);
    clear(&mut chunk, 0..8, &mut spares);
    assert_eq!(chunk.stored_bytes(SHAPE), 32);
    clear(&mut chunk, 8..16, &mut spares);
    assert_eq!((chunk.stored_bytes(SHAPE), contents(&chunk)), (0, ([0; 16], [0xFF; 16])), "two halves make a whole");
}

#[test]
fn a_chunk_that_keeps_its_memory_is_blank_after_it_was_cleared() {
    let (mut chunk, mut spares) = (Chunk::blank(Buffer::zeroed(16)), spares());
    assert!(chunk.data().is_none() && chunk.stored_bytes(SHAPE) == 16);
    assert!(!chunk.flip_data(0, 1, &mut spares), "nothing is stored there");
    for is_shared in [false, true] {
        write(&mut chunk, 0..16, 7, &mut spares);
        let shared = chunk.data().cloned().filter(|_| is_shared);
        top_up(&mut spares);
        for blocks in [0..8, 8..16, 4..12] {
            let gone = chunk.clear(SHAPE, &blocks, &mut spares, true);
            assert!(gone[0].is_none());
            spares.give(gone);
            top_up(&mut spares);
        }
        assert_eq!((contents(&chunk), chunk.stored_bytes(SHAPE)), (([0; 16], [0xFF; 16]), 16));
        assert!(chunk.data().is_none() && shared.is_none_or(|shared| shared[..] == [7; 16]));
        // Its bytes are really zeroes.
        write(&mut chunk, 0..1, 1, &mut spares);
        assert_eq!(contents(&chunk).0[1..], [0; 15]);
    }
}

#[test]
fn bytes_are_flipped_only_where_there_are_some() {
    let (mut chunk, mut spares) = (Chunk::default(), spares());
    assert!(!chunk.flip_data(3, 1, &mut spares) && !chunk.flip_tags(3, 1, &mut spares));
    write(&mut chunk, 3..4, 1, &mut spares);
    assert!(chunk.flip_data(4, 2, &mut spares) && chunk.flip_tags(3, 1, &mut spares));
    let (data, tags) = contents(&chunk);
    assert_eq!((&data[3..5], tags[3]), (&[1, 2][..], 100));
}

#[test]
fn what_was_shared_keeps_its_bytes_whatever_is_changed() {
    let mut spares = spares();
    let changes: [fn(&mut Chunk, &mut Spares); 5] = [
        |chunk, spares| write(chunk, 2..6, 9, spares),
        |chunk, spares| write(chunk, 0..16, 9, spares),
        |chunk, spares| clear(chunk, 0..8, spares),
        |chunk, spares| clear(chunk, 0..16, spares),
        |chunk, spares| assert!(chunk.flip_data(3, 0xFF, spares) && chunk.flip_tags(3, 0xFF, spares)),
    ];
    for change in changes {
        let mut chunk = Chunk::default();
        write(&mut chunk, 0..16, 7, &mut spares);
        let shared = (chunk.data().cloned().unwrap(), chunk.tags().cloned().unwrap());
        change(&mut chunk, &mut spares);
        assert_eq!((&shared.0[..], &shared.1[..]), (&[7; 16][..], &[107; 16][..]));
        assert_ne!(contents(&chunk), ([7; 16], [107; 16]), "the change was made");
        top_up(&mut spares);
    }
}

#[test]
fn short_reads_copy_after_a_change_had_to_copy_until_there_were_many_of_them() {
    let (mut chunk, mut spares) = (Chunk::default(), spares());
    write(&mut chunk, 0..16, 1, &mut spares);
    assert!(!chunk.should_copy(1), "no change met a read yet");
    let shared = chunk.data().cloned();
    write(&mut chunk, 0..16, 2, &mut spares);
    assert!(!chunk.should_copy(1), "nothing was copied, as all was replaced");
    drop(shared);
    let shared = chunk.data().cloned();
    write(&mut chunk, 0..1, 3, &mut spares);
    drop(shared);
    assert!(!chunk.should_copy(SHORT_READ_BYTES + 1));
    assert!((1..COPIED_READS).all(|_| chunk.should_copy(1)));
    // Another write while it is so: the reads are counted anew.
    write(&mut chunk, 0..1, 4, &mut spares);
    assert!((0..COPIED_READS).all(|_| chunk.should_copy(SHORT_READ_BYTES)));
    assert!(!chunk.should_copy(1));
}

#[test]
fn marks_go_with_the_content_that_they_are_of() {
    let (mut chunk, mut spares) = (Chunk::default(), spares());
    chunk.mark(SHAPE, 3, 1);
    chunk.mark(SHAPE, 4, 2);
    assert_eq!(chunk.marks().map(|marks| marks[2..6].to_vec()), Some(vec![0, 1, 2, 0]));
    write(&mut chunk, 3..4, 7, &mut spares);
    assert_eq!(chunk.marks().map(|marks| marks[2..6].to_vec()), Some(vec![0, 0, 2, 0]));
    clear(&mut chunk, 4..16, &mut spares);
    assert!(chunk.marks().is_none());
}
