-- Made by `make schema` from the migrations.
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0001');
CREATE TABLE artifact_members (
	parent VARCHAR(64) NOT NULL, 
	path TEXT NOT NULL, 
	child VARCHAR(64) NOT NULL, 
	CONSTRAINT pk_artifact_members PRIMARY KEY (parent, path), 
	CONSTRAINT fk_artifact_members_parent FOREIGN KEY(parent) REFERENCES artifacts (digest), 
	CONSTRAINT fk_artifact_members_child FOREIGN KEY(child) REFERENCES artifacts (digest)
);
CREATE TABLE artifacts (
	digest VARCHAR(64) NOT NULL, 
	kind VARCHAR(32) NOT NULL, 
	bytes INTEGER NOT NULL, 
	files TEXT NOT NULL, 
	label TEXT NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	created_at VARCHAR(32) NOT NULL, 
	verified_at VARCHAR(32), 
	CONSTRAINT pk_artifacts PRIMARY KEY (digest), 
	CONSTRAINT ck_artifacts_state CHECK (state in ('present','evicted','missing','external'))
);
CREATE TABLE execution_inputs (
	execution INTEGER NOT NULL, 
	role TEXT NOT NULL, 
	position INTEGER NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	CONSTRAINT pk_execution_inputs PRIMARY KEY (execution, role, position), 
	CONSTRAINT fk_execution_inputs_execution FOREIGN KEY(execution) REFERENCES executions (id), 
	CONSTRAINT fk_execution_inputs_digest FOREIGN KEY(digest) REFERENCES artifacts (digest)
);
CREATE TABLE execution_outputs (
	execution INTEGER NOT NULL, 
	role TEXT NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	CONSTRAINT pk_execution_outputs PRIMARY KEY (execution, role), 
	CONSTRAINT fk_execution_outputs_execution FOREIGN KEY(execution) REFERENCES executions (id), 
	CONSTRAINT fk_execution_outputs_digest FOREIGN KEY(digest) REFERENCES artifacts (digest)
);
CREATE TABLE executions (
	id INTEGER NOT NULL, 
	run_id VARCHAR(32) NOT NULL, 
	stage TEXT NOT NULL, 
	kind VARCHAR(32) NOT NULL, 
	"key" VARCHAR(64), 
	document TEXT, 
	disposition VARCHAR(16) NOT NULL, 
	reused_from INTEGER, 
	attempt VARCHAR(32), 
	metrics TEXT NOT NULL, 
	resources TEXT NOT NULL, 
	environment TEXT NOT NULL, 
	error TEXT, 
	seconds FLOAT, 
	started_at VARCHAR(32) NOT NULL, 
	ended_at VARCHAR(32), 
	CONSTRAINT pk_executions PRIMARY KEY (id), 
	CONSTRAINT fk_executions_run_id FOREIGN KEY(run_id) REFERENCES runs (id), 
	CONSTRAINT fk_executions_reused_from FOREIGN KEY(reused_from) REFERENCES executions (id), 
	CONSTRAINT ck_executions_disposition CHECK (disposition in ('executed','reused','reproduced','failed','running','interrupted'))
);
CREATE TABLE file_stats (
	path TEXT NOT NULL, 
	device INTEGER NOT NULL, 
	inode INTEGER NOT NULL, 
	size INTEGER NOT NULL, 
	mtime_ns INTEGER NOT NULL, 
	ctime_ns INTEGER NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	CONSTRAINT pk_file_stats PRIMARY KEY (path)
);
CREATE TABLE pins (
	digest VARCHAR(64) NOT NULL, 
	note TEXT NOT NULL, 
	created_at VARCHAR(32) NOT NULL, 
	CONSTRAINT pk_pins PRIMARY KEY (digest), 
	CONSTRAINT fk_pins_digest FOREIGN KEY(digest) REFERENCES artifacts (digest)
);
CREATE TABLE runs (
	id VARCHAR(32) NOT NULL, 
	seq INTEGER NOT NULL, 
	name TEXT NOT NULL, 
	kind VARCHAR(16) NOT NULL, 
	status VARCHAR(16) NOT NULL, 
	manifest_digest VARCHAR(64) NOT NULL, 
	manifest_path TEXT NOT NULL, 
	manifest_text TEXT NOT NULL, 
	resolved TEXT NOT NULL, 
	overrides TEXT NOT NULL, 
	environment TEXT NOT NULL, 
	started_at VARCHAR(32) NOT NULL, 
	ended_at VARCHAR(32), 
	host TEXT NOT NULL, 
	pid INTEGER NOT NULL, 
	CONSTRAINT pk_runs PRIMARY KEY (id), 
	CONSTRAINT uq_runs_seq UNIQUE (seq), 
	CONSTRAINT ck_runs_kind CHECK (kind in ('submit','reproduce')), 
	CONSTRAINT ck_runs_status CHECK (status in ('running','done','failed','interrupted'))
);
CREATE TABLE state_rows (
	"key" VARCHAR(64) NOT NULL, 
	shard VARCHAR(64) NOT NULL, 
	start INTEGER NOT NULL, 
	tokens INTEGER NOT NULL, 
	digest VARCHAR(64) NOT NULL, 
	CONSTRAINT pk_state_rows PRIMARY KEY ("key"), 
	CONSTRAINT fk_state_rows_shard FOREIGN KEY(shard) REFERENCES state_shards (digest)
);
CREATE TABLE state_shards (
	digest VARCHAR(64) NOT NULL, 
	bytes INTEGER NOT NULL, 
	rows INTEGER NOT NULL, 
	tokens INTEGER NOT NULL, 
	created_at VARCHAR(32) NOT NULL, 
	CONSTRAINT pk_state_shards PRIMARY KEY (digest)
);
CREATE INDEX ix_artifact_members_child ON artifact_members (child);
CREATE INDEX ix_executions_key_disposition ON executions ("key", disposition);
CREATE INDEX ix_executions_run_id ON executions (run_id);
CREATE INDEX ix_executions_kind_stage ON executions (kind, stage);
CREATE INDEX ix_execution_inputs_digest ON execution_inputs (digest);
CREATE INDEX ix_execution_outputs_digest ON execution_outputs (digest);
CREATE INDEX ix_state_rows_shard ON state_rows (shard);
