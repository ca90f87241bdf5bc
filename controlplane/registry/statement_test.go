package registry

import (
	"fmt"
	"testing"

	"aether/controlplane/registrypb"
)

// TestStatements: decision 032's table. there is what stands, by what comes.
func TestStatements(t *testing.T) {
	a := func(at uint64) Statement { return Statement{"a", at} }
	b := func(at uint64) Statement { return Statement{"b", at} }
	for _, tt := range []struct {
		there, by       Statement
		outdates, keeps bool
	}{
		{a(2), a(1), true, true},
		{a(2), a(2), false, false},
		{a(2), a(3), false, false},
		{a(2), b(1), false, true}, // another node has the address now
		{a(2), b(9), false, true},
		{a(0), b(9), false, true}, // also one that does not say when
		{a(2), a(0), false, false},
		{a(2), Statement{}, false, false},
		{a(2), b(0), false, true}, // it takes away its own rows alone, whether or not it says when
		{a(0), a(1), false, false},
		{Statement{}, a(1), false, false},
		{Statement{}, Statement{}, false, false},
	} {
		t.Run(fmt.Sprint(tt.there, tt.by), func(t *testing.T) {
			if o, k := tt.there.Outdates(tt.by), tt.there.Keeps(tt.by); o != tt.outdates || k != tt.keeps {
				t.Errorf("outdates %t, keeps %t, want %t, %t", o, k, tt.outdates, tt.keeps)
			}
		})
	}
	e := &registrypb.ServiceEndpoint{Stated: 7, KubernetesMetadata: &registrypb.ServiceEndpoint_KubernetesMetadata{NodeName: "a"}}
	if got := StatementOf(e); got != a(7) {
		t.Errorf("%v", got)
	}
	for _, absurd := range []uint64{1 << 62, 1<<64 - 1} { // nothing could be later
		if e.Stated = absurd; StatementOf(e) != a(0) {
			t.Errorf("%d is believed", absurd)
		}
	}
	e.Stated, e.KubernetesMetadata = 7, nil
	if StatementOf(e) != (Statement{}) {
		t.Error("a statement of nobody")
	}
}

// TestAddress: two texts of one address are one.
func TestAddress(t *testing.T) {
	for text, want := range map[string]string{
		"10.0.0.1": "10.0.0.1", "::ffff:10.0.0.1": "10.0.0.1", "::ffff:a00:1": "10.0.0.1",
		"FD00::1": "fd00::1", "fd00:0:0:0:0:0:0:1": "fd00::1", "fd00::0001": "fd00::1", "cart": "cart", "": "",
	} {
		if got := Address(text); got != want {
			t.Errorf("%q is %q, want %q", text, got, want)
		}
	}
}

// TestNamesContents: what our registrar calls a state, and what others do (contract 9.7).
func TestNamesContents(t *testing.T) {
	for v, want := range map[string]bool{
		"00112233445566778899aabbccddeeff": true, "": false, "-": false, "57": false, "18446744073709551615": false,
		"00112233445566778899aabbccddeefg": false, "00112233-4455-6677-8899-aabbccddeeff": false, "0011223344556677 899aabbccddeeff": false,
	} {
		if got := NamesContents(v); got != want {
			t.Errorf("%q: %t", v, got)
		}
	}
}
