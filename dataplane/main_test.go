package dataplane_test

import (
	"flag"
	"os"
	"runtime"
	"strconv"
	"testing"
)

// waiting is how many parallel tests run at once here, at least: they wait for lives of certificates and for deadlines, and
// leave the machine alone meanwhile.
const waiting = 8

func TestMain(m *testing.M) {
	flag.Parse()
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "test.parallel" })
	if !given {
		if err := flag.Set("test.parallel", strconv.Itoa(max(waiting, runtime.GOMAXPROCS(0)))); err != nil {
			panic(err)
		}
	}
	os.Exit(m.Run())
}
