package hpack

import "cmp"

// defaultLimit is the limit of a Decoder that names none: 60 KiB, as Envoy has it.
const defaultLimit = 60 << 10

// Decoder turns the field blocks of one direction of one connection into
// fields. Not safe for concurrent use. Make one with NewDecoder.
type Decoder struct {
	t     table
	arena []byte // Huffman-decoded strings of the current block
	limit int
	mark  Marker
	marks [staticLen + 1]uint8
	large [256 / 64]uint64 // the marks of a block's fields, if they exceed the limit
}

// NewDecoder makes a Decoder that refuses blocks whose fields take more than
// limit octets, names and values and 32 for each (RFC 9113 6.5.2,
// SETTINGS_MAX_HEADER_LIST_SIZE); 0: 61440. mark may be nil: every Mark is 0.
func NewDecoder(limit int, mark Marker) *Decoder {
	if mark == nil {
		mark = func(_, _ []byte) uint8 { return 0 }
	}
	d := &Decoder{limit: cmp.Or(limit, defaultLimit), mark: mark}
	d.t.max = MaxTable
	for i := 1; i <= staticLen; i++ {
		d.marks[i] = mark(static[i].Name, static[i].Value)
	}
	return d
}

// Marked reports whether a field of the last block, which was ErrTooLarge, had that mark.
func (d *Decoder) Marked(mark uint8) bool { return d.large[mark>>6]>>(mark&63)&1 != 0 }

// Held is how many bytes of memory the peer's fields take.
func (d *Decoder) Held() int { return cap(d.arena) + d.t.held() }

// Trim gives back the memory that is not state. Fields handed out are void.
func (d *Decoder) Trim() {
	d.arena = nil
	d.t.compact()
}

// Decode decodes one whole field block and appends its fields to out. They are
// valid until the next call and as long as block is. Blocks must be given in
// the order in which they arrived, each once.
//
// With ErrTooLarge the block was well-formed but its fields exceed the limit,
// and none is returned. With ErrInvalid (RFC 7541: a
// COMPRESSION_ERROR) or ErrBomb the tables of the two ends differ for good.
func (d *Decoder) Decode(block []byte, out []Field) ([]Field, error) {
	d.t.compact()
	d.arena = d.arena[:0]
	var (
		total   int
		tooMuch error
		p       = block
		start   = true // size updates stand only before the first field (RFC 7541 4.2)
	)
	for len(p) > 0 {
		var (
			f   Field
			i   int
			ok  bool
			b   = p[0]
			add = false
		)
		switch {
		case b&0x80 != 0: // indexed field, RFC 7541 6.1
			if i, p, ok = readInt(p, 7); !ok {
				return out, ErrInvalid
			}
			if f, ok = d.field(i); !ok {
				return out, ErrInvalid
			}
		case b&0xe0 == 0x20: // table size update, 6.3
			if i, p, ok = readInt(p, 5); !ok || i > MaxTable || !start {
				return out, ErrInvalid
			}
			d.t.setMax(i)
			continue
		default: // literal, 6.2
			bits := uint(4)
			if b&0x40 != 0 {
				bits, add = 6, true
			}
			if i, p, ok = readInt(p, bits); !ok {
				return out, ErrInvalid
			}
			if i == 0 {
				if f.Name, p, ok = d.str(p); !ok {
					return out, ErrInvalid
				}
			} else if f, ok = d.field(i); !ok {
				return out, ErrInvalid
			}
			if f.Value, p, ok = d.str(p); !ok {
				return out, ErrInvalid
			}
			f.Mark = d.mark(f.Name, f.Value)
			if add {
				d.t.add(f.Name, f.Value, f.Mark)
			}
		}
		start = false
		total += len(f.Name) + len(f.Value) + overhead
		if total <= d.limit {
			out = append(out, f)
			continue
		}
		if total > 16*d.limit {
			return nil, ErrBomb
		}
		// From here only the table matters: nothing refers to the arena, and
		// the table may move, which bounds both.
		if tooMuch == nil {
			d.large = [len(d.large)]uint64{}
			for i := range out {
				d.large[out[i].Mark>>6] |= 1 << (out[i].Mark & 63)
			}
		}
		d.large[f.Mark>>6] |= 1 << (f.Mark & 63)
		tooMuch, out = ErrTooLarge, out[:0]
		d.arena = d.arena[:0]
		d.t.compact()
	}
	return out, tooMuch
}

// field returns the field with index i of both tables (RFC 7541 2.3.3).
func (d *Decoder) field(i int) (Field, bool) {
	switch {
	case i == 0:
		return Field{}, false
	case i <= staticLen:
		f := static[i]
		f.Mark = d.marks[i]
		return f, true
	case i-staticLen > d.t.n:
		return Field{}, false
	}
	e := d.t.at(i - staticLen)
	return Field{d.t.name(e), d.t.value(e), e.mark}, true
}

// str reads a string literal (RFC 7541 5.2).
func (d *Decoder) str(p []byte) (s, rest []byte, ok bool) {
	if len(p) == 0 {
		return nil, nil, false
	}
	huffman := p[0]&0x80 != 0
	n, p, ok := readInt(p, 7)
	if !ok || n > len(p) {
		return nil, nil, false
	}
	s, rest = p[:n:n], p[n:]
	if huffman {
		o := len(d.arena)
		if d.arena, ok = appendHuffman(d.arena, s); !ok {
			return nil, nil, false
		}
		s = d.arena[o:len(d.arena):len(d.arena)]
	}
	return s, rest, true
}
