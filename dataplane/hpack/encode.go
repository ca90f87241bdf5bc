package hpack

import (
	"encoding/binary"
	"math/bits"
)

// maxIndexed bounds the fields worth a place in the table: a larger one would
// push out too much.
const maxIndexed = MaxTable / 4

// slot remembers a field by its hash. id is the number of its table entry,
// counted from 1; 0: seen once, not in the table.
type slot struct{ hash, id uint32 }

const slotSize = 8 // bytes of a slot

// Encoder turns the fields of one direction of one connection into field
// blocks. Not safe for concurrent use. Make one with NewEncoder.
//
// A block is written by Begin followed by Indexed, Named and Field calls that
// each append one field, and must reach the peer: blocks change the table.
type Encoder struct {
	t      table
	lowest int           // smallest size set since the last block; above MaxTable: no update to send
	seen   *[256][2]slot // by hash; nil: nothing seen
}

// NewEncoder makes an Encoder with a table of MaxTable octets.
func NewEncoder() *Encoder {
	e := &Encoder{lowest: MaxTable + 1}
	e.t.max = MaxTable
	return e
}

// SetMaxTable obeys the peer's SETTINGS_HEADER_TABLE_SIZE, up to MaxTable.
// The next Begin tells the peer (RFC 7541 4.2).
func (e *Encoder) SetMaxTable(n uint32) {
	size := int(min(n, MaxTable))
	if size == e.t.max {
		return
	}
	if size > e.lowest {
		// It shrank and grows again between two blocks: both must be told. Some
		// decoders (x/net/http2/hpack, so grpc-go) take a second update only
		// while their table is empty, so the first one empties it.
		e.t.setMax(0)
		e.lowest = 0
	}
	e.t.setMax(size)
	e.lowest = min(e.lowest, size)
}

// Held is how many bytes of memory the fields that were sent take.
func (e *Encoder) Held() int {
	n := e.t.held()
	if e.seen != nil {
		n += len(e.seen) * 2 * slotSize
	}
	return n
}

// Trim gives back the memory that is not state. Fields then have to be seen
// twice again before they are indexed.
func (e *Encoder) Trim() {
	e.seen = nil
	e.t.compact()
}

// Begin starts a block: it appends the table size updates that are due.
func (e *Encoder) Begin(dst []byte) []byte {
	if e.lowest <= MaxTable {
		if e.lowest < e.t.max {
			dst = appendInt(dst, 0x20, 5, e.lowest)
		}
		dst = appendInt(dst, 0x20, 5, e.t.max)
		e.lowest = MaxTable + 1
	}
	return dst
}

// AppendIndexed appends the field with static index i, such as MethodGET,
// name and value.
func AppendIndexed(dst []byte, i int) []byte { return append(dst, 0x80|byte(i)) }

// Named appends a field whose name is that of static index i.
func (e *Encoder) Named(dst []byte, i int, value []byte) []byte {
	name := static[i].Name
	h := hash(value, staticHash[i])
	s, back := e.find(h, name, value)
	if back > 0 {
		return appendInt(dst, 0x80, 7, staticLen+back)
	}
	return e.miss(dst, i, s, h, name, value)
}

// Field appends a field. name must be lower case.
func (e *Encoder) Field(dst, name, value []byte) []byte {
	nameHash := hash(name, 0)
	h := hash(value, nameHash)
	s, back := e.find(h, name, value)
	if back > 0 {
		return appendInt(dst, 0x80, 7, staticLen+back)
	}
	i := staticName(name, nameHash)
	if i == acceptEncGzp && string(value) == "gzip, deflate" {
		return AppendIndexed(dst, i)
	}
	return e.miss(dst, i, s, h, name, value)
}

// find looks a field up in the table: back is its index there, 1 being the
// newest, or 0, and s where it was seen before, or nil.
func (e *Encoder) find(h uint64, name, value []byte) (s *slot, back int) {
	if e.seen == nil {
		e.seen = new([256][2]slot)
	}
	set := &e.seen[h>>56]
	switch uint32(h) {
	case set[0].hash:
		s = &set[0]
	case set[1].hash:
		s = &set[1]
	default:
		return nil, 0
	}
	if !e.live(s.id) {
		return s, 0
	}
	ent := &e.t.ent[(s.id-1)%uint32(len(e.t.ent))]
	if string(e.t.name(ent)) != string(name) || string(e.t.value(ent)) != string(value) {
		return s, 0
	}
	return s, int(e.t.head-s.id) + 1
}

// miss appends a field that is in neither table; i is the static index of its
// name or 0.
func (e *Encoder) miss(dst []byte, i int, s *slot, h uint64, name, value []byte) []byte {
	if never>>uint(i)&1 != 0 {
		return appendLiteral(dst, 0x10, 4, i, name, value)
	}
	if s == nil { // first sight: take a slot that points nowhere, if there is one
		set := &e.seen[h>>56]
		s = &set[0]
		if e.live(s.id) {
			s = &set[1]
		}
		*s = slot{hash: uint32(h)}
		return appendLiteral(dst, 0, 4, i, name, value)
	}
	if size := len(name) + len(value) + overhead; size > maxIndexed || size > e.t.max {
		return appendLiteral(dst, 0, 4, i, name, value)
	}
	e.t.compact()
	e.t.add(name, value, 0)
	s.id = e.t.head
	return appendLiteral(dst, 0x40, 6, i, name, value)
}

// live reports whether the entry numbered id, from 1, is in the table.
func (e *Encoder) live(id uint32) bool { return id != 0 && e.t.head-id < uint32(e.t.n) }

func appendLiteral(dst []byte, first byte, prefix uint, i int, name, value []byte) []byte {
	dst = appendInt(dst, first, prefix, i)
	if i == 0 {
		dst = append(appendInt(dst, 0, 7, len(name)), name...)
	}
	return append(appendInt(dst, 0, 7, len(value)), value...)
}

// hash mixes b into seed. A peer that makes fields collide only loses the
// indexing of its own fields, so it needs no secret.
func hash(b []byte, seed uint64) uint64 {
	const k0, k1 = 0x9e3779b97f4a7c15, 0xd6e8feb86659fd93
	h := seed ^ uint64(len(b))*k0
	for len(b) > 8 {
		h = mix(h^binary.LittleEndian.Uint64(b), k1)
		b = b[8:]
	}
	var tail uint64
	switch {
	case len(b) == 8:
		tail = binary.LittleEndian.Uint64(b)
	case len(b) >= 4:
		tail = uint64(binary.LittleEndian.Uint32(b)) | uint64(binary.LittleEndian.Uint32(b[len(b)-4:]))<<32
	case len(b) > 0:
		tail = uint64(b[0]) | uint64(b[len(b)/2])<<8 | uint64(b[len(b)-1])<<16
	}
	return mix(h^tail^k0, k1)
}

func mix(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a, b)
	return hi ^ lo
}
