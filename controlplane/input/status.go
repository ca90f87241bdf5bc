package input

import (
	"time"

	"aether/dataplane/model"
)

// Report is what the control loop tells of itself: what each source knows and how it
// fares, what is not in force, and what is kept for the next start. It is what the
// admin shows as JSON; durations are in milliseconds.
type Report struct {
	Seq uint64    `json:"seq"` // of the state in force; 0: none yet
	At  time.Time `json:"at"`  // when it came into force
	// Synced: every source has said its whole state since the process started.
	Synced bool `json:"synced"`
	// StaleSince is how old the oldest part of the state in force is, where a source
	// is not connected or has not been heard since the start; nil: all is fresh.
	StaleSince    *time.Time      `json:"stale_since,omitempty"`
	Sources       []SourceReport  `json:"sources"`
	LastGood      *LastGoodReport `json:"last_good,omitempty"` // nil: none is kept
	ProblemsTotal int             `json:"problems_total"`
	Problems      []model.Problem `json:"problems"` // not necessarily all of them
}

// SourceReport is what one source knows.
type SourceReport struct {
	Name   string `json:"name"`
	Synced bool   `json:"synced"` // it has said its whole state since the process started
	// Restored: what it knows is what it said before the process started.
	Restored  bool   `json:"restored,omitempty"`
	Connected bool   `json:"connected"`
	Err       string `json:"error,omitempty"`
	Version   string `json:"version,omitempty"`
	// Since when it is connected, or not.
	Since time.Time `json:"since,omitzero"`
	// Changed is when it last said something; SilentMS is how long that is ago.
	Changed  time.Time `json:"changed,omitzero"`
	SilentMS int64     `json:"silent_ms"`
	Counts   Counts    `json:"counts"`
}

// Counts are of what a source knows.
type Counts struct {
	Services  int `json:"services"` // that have rows
	Endpoints int `json:"endpoints"`
	Objects   int `json:"service_objects"`
	Routes    int `json:"routes"`
	Filters   int `json:"filters"`
	Catalog   int `json:"catalog"`
	Workloads int `json:"workloads"`
	Problems  int `json:"problems"`
}

// LastGoodReport tells of the last good state on disk.
type LastGoodReport struct {
	Path string `json:"path"`
	// Written is of when the state is that the file has; zero: there is none.
	Written time.Time `json:"written,omitzero"`
	AgeMS   int64     `json:"age_ms"`
	Bytes   int64     `json:"bytes"`
	// Restored: the process started with it.
	Restored bool   `json:"restored"`
	Err      string `json:"error,omitempty"` // why it is not written, or was not taken
}
