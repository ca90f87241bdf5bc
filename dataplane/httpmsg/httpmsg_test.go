package httpmsg

import "testing"

func TestDelLike(t *testing.T) {
	h := Head{}
	for _, n := range []string{"a", "x-caller-id", "x_caller-id", "b", "x_caller_id", "x-caller-ids", "xxcaller-id", "x-caller--id"} {
		h.Add([]byte(n), []byte("v"))
	}
	h.DelLike("x-caller-id")
	got := ""
	for _, f := range h.Fields {
		got += string(f.Name) + " "
	}
	if want := "a b x-caller-ids xxcaller-id x-caller--id "; got != want {
		t.Errorf("left: %s, want %s", got, want)
	}
}
